"""`diptych bench serve --up` on a tiny model without a tokenizer: a whole system under load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_load_of_its_own_system_is_answered_and_answers_hold_when_asked_again(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    record = tmp_path / "record.json"
    command = ["bench", "serve", "--up", "--model", str(model), "--num-prompts", "12"]
    load = ["--request-rate", "20", "--random-input-len", "64", "--random-output-len", "8"]
    more = ["--ignore-eos", "--check", "4", "--save-detailed", "--output-json", str(record)]
    system = ["--", "--load-format", "dummy", "--device", "cpu", "--handoff", "direct"]

    done = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", *command, *load, *more, *system],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(record.read_text())
    assert figures["completed"] == 12
    assert figures["input_lens"] == [64] * 12
    assert figures["output_lens"] == [8] * 12
    assert figures["answers_equal"] == 4
    assert figures["mean_ttft_ms"] <= figures["mean_ttst_ms"] <= figures["mean_e2el_ms"]
    assert figures["mean_router_t12_ms"] > 0
    assert figures["handoffs"]["direct done"] > 0
    assert "Mean TTST (ms):" in done.stdout
