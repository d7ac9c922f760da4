"""Two offline engines share KV through a folder; the answers are those of one engine alone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from diptych import LLM, KVTransferConfig, SamplingParams
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/shared_storage.py"
PROMPTS: list[str] = runpy.run_path(str(EXAMPLE))["PROMPTS"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(model: str) -> list[str]:
    """The answers of one engine without a connector."""
    with LLM(model) as llm:
        return answers(llm)


def answers(llm: LLM, max_tokens: int = 16) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [o.outputs[0].text for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def transfer(folder: Path, role: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )


def test_the_example_runs_in_two_processes_and_recomputes_one_token_of_each_prompt(
    model: str, alone: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), model],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    consumed = re.findall(r"kv_consumer: (\d+) of (\d+) prompt .*-> (.*)", done.stdout)
    assert [text for _, _, text in consumed] == [repr(text) for text in alone]
    assert all(int(cached) == int(total) - 1 for cached, total, _ in consumed)


def test_damaged_files_cost_time_and_nothing_else(
    model: str, alone: list[str], tmp_path: Path
) -> None:
    with LLM(model, kv_transfer_config=transfer(tmp_path, "kv_producer")) as producer:
        answers(producer, max_tokens=1)
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) >= 3
    for number, file in enumerate(files):
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] if number % 2 else raw[:-100] + bytes(100))
    with LLM(model, kv_transfer_config=transfer(tmp_path, "kv_consumer")) as consumer:
        assert answers(consumer) == alone


def test_an_engine_with_both_roles_meets_its_own_files(
    model: str, alone: list[str], tmp_path: Path
) -> None:
    config = transfer(tmp_path, "kv_both")
    with LLM(model, kv_transfer_config=config, enable_prefix_caching=False) as llm:
        assert answers(llm) == alone
        assert answers(llm) == alone
