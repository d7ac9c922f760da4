"""Prompts that arrive while others run, and block sizes, measured on a small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.bench.worn_pool import runs_of_prompt
from diptych.cli import main
from tests.bench.test_ladder import CONFIG


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = [f"--model={tmp_path}", "--load-format=dummy", "--device=cpu", "--num-threads=1"]
    return [*engine, "--max-model-len=512", f"--output-json={tmp_path / 'out.json'}"]


def read(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return value


def test_a_known_prefix_saves_its_time(tmp_path: Path, flags: list[str]) -> None:
    lengths = [
        "--prefix-len=448",
        "--new-tokens=4",
        "--num-iters=3",
        "--thresholds",
        "--step-tokens",
    ]
    assert main(["bench", "mixed", *flags, *lengths]) == 0
    found = read(tmp_path)["prefix"]
    assert len(found["cold_runs_s"]) == len(found["warm_runs_s"]) == 3
    assert found["warm_share"] == pytest.approx(found["warm_s"] / found["cold_s"])


def test_each_threshold_has_its_gaps(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = ["--prefix-len=32", "--new-tokens=4", "--num-iters=1"]
    running = ["--num-running=3", "--context=8", "--prompt-len=200", "--arrivals=2"]
    thresholds = ["--thresholds", "0", "50", "--step-tokens", "103"]
    assert main(["bench", "mixed", *flags, *prefix, *running, *thresholds]) == 0
    whole, chunked, small = read(tmp_path)["stalls"]
    assert whole["num_gaps"] == 2 * 3, "one step a prompt"
    assert chunked["num_gaps"] == 2 * 3 * 4, "four steps a prompt"
    assert whole["long_prefill_token_threshold"] == 0
    assert chunked["long_prefill_token_threshold"] == 50
    # three tokens of each step are the running requests'
    assert small["num_gaps"] == 2 * 3 * 2
    assert (small["long_prefill_token_threshold"], small["max_num_batched_tokens"]) == (0, 103)
    for row in (whole, chunked, small):
        assert 0 < row["p50_s"] <= row["p99_s"] <= row["max_s"]
    assert "tokens a step" in capsys.readouterr().out


def test_block_sizes_are_compared(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    points = ["--points=2@16", "--prefill=1x40", "--block-sizes", "16", "32", "--prompt-len=320"]
    assert main(["bench", "blocks", *flags, *points]) == 0
    rows = read(tmp_path)["rows"]
    assert [row["block_size"] for row in rows] == [16, 32]
    assert [row["num_blocks"] for row in rows] == [20, 10]
    # one KV head of 16, one layer, keys and values, float32
    assert [row["block_bytes"] for row in rows] == [16 * 128, 32 * 128]
    assert all(row["decode"][0]["tpot_s"] > 0 and row["prefill"][0]["time_s"] > 0 for row in rows)
    assert "2@16" in capsys.readouterr().out


def test_worn_pools_leave_few_neighbours() -> None:
    assert 100 < runs_of_prompt(8192, 64) <= 128
