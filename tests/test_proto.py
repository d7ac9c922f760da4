"""The committed contracts: generated code is current, all is explained, old hosts load it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
SOURCES = sorted(PROTO.glob("*.proto"))
DECLARATION = re.compile(
    r"^\s*(message|enum|service|rpc|oneof|[\w.<>, ]+\s\w+\s*=\s*\d+;|\w+ = \d+;)"
)


def test_generated_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", str(PROTO / "generate.sh"), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=300,
    )
    made = sorted((tmp_path / "diptych" / "proto").iterdir())
    assert len(made) == 3 * len(SOURCES)
    for path in made:
        assert path.read_text() == (PROTO / path.name).read_text(), f"run proto/generate.sh: {path}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_declaration_has_a_comment_above_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    body = next(i for i, line in enumerate(lines) if re.match(r"(message|enum|service)\b", line))
    bare = [
        f"{path.name}:{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if number >= body - 1
        and DECLARATION.match(line)
        and not line.strip().startswith(("oneof", "//"))
        and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare


@pytest.mark.parametrize("path", sorted(PROTO.glob("*_pb2_grpc.py")), ids=lambda path: path.name)
def test_generated_code_asks_for_no_newer_grpc_than_1_84(path: Path) -> None:
    found = re.search(r"GRPC_GENERATED_VERSION = '(\d+)\.(\d+)\.", path.read_text())
    assert found is not None
    assert (int(found[1]), int(found[2])) <= (1, 84)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_package_is_versioned(path: Path) -> None:
    assert "package diptych.v1;" in path.read_text()
