"""`diptych bench prefix` on a tiny model: the second engine loads what the first one stored."""

from __future__ import annotations

import json
from pathlib import Path

from diptych.cli import main
from tests.tiny_models import make_tiny_model


def test_the_warm_prompt_is_loaded(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocab_size=30_000)
    record = tmp_path / "record.json"
    command = ["bench", "prefix", "--model", str(model), "--device", "cpu", "--num-threads", "1"]
    sizes = ["--prefix-tokens", "128", "--new-tokens", "16", "--rounds", "1"]
    assert (
        main([*command, *sizes, "--pool-bytes", str(64 << 20), "--output-json", str(record)]) == 0
    )
    figures = json.loads(record.read_text())
    assert figures["loaded_tokens"] == 128
    assert figures["cold_s"] > 0
