"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(
    r"`((?:src|services|kernels|proto|helm|docs|tests|bench|scripts|constraints)/[\w./-]+)`"
)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]

    assert not missing


def test_architecture_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    pairs = re.findall(r"`((?:src|services)/[\w/]+\.py)`\s+\(`([\w.]+)`", text)

    for name, function in pairs:
        assert re.search(rf"\b(def|class) {function.split('.')[-1]}\b", (ROOT / name).read_text())
    assert len(pairs) >= 6


def test_every_test_that_a_document_names_is_there() -> None:
    named = {n for document in DOCUMENTS for n in TEST.findall(document.read_text())}

    assert len(named) > 60
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), name


def test_every_decision_has_a_number_of_its_own_and_bears_it() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [path.name[:4] for path in decisions]

    assert numbers == [f"{i + 1:04}" for i in range(len(decisions))]
    for number, path in zip(numbers, decisions, strict=True):
        assert path.read_text().startswith(f"# {number}. ")


def test_a_decision_that_is_mentioned_exists() -> None:
    texts = [path.read_text() for path in DOCUMENTS]
    for folder in ("kernels", "services", "src"):
        texts += [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    have = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    linked = [re.findall(r"\[decision (\d{4})\]\(decisions/(\d{4})", text) for text in texts]

    assert not [pair for pairs in linked for pair in pairs if pair[0] != pair[1]]
    assert {n for text in texts for n in re.findall(r"decisions?[ /](\d{4})", text)} <= have
