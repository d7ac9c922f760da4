import json
from pathlib import Path

import pytest

from diptych.cli import main


def test_the_store_is_measured_against_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = ["--object-bytes=65536", "--set-bytes=1048576", "--rounds=1"]
    assert main(["bench", "kvstore", *flags, "--output-json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [row["transport"] for row in figures["rows"]] == ["memory", "stream", "socket"]
    [ratio] = figures["ratios"]
    assert ratio["to"] == "socket"
    [own, floor] = (row["seconds"] for row in figures["rows"][1:])
    assert ratio["put"] == pytest.approx(floor[0]["put"] / own[0]["put"])
    assert figures["calls"]["view_s"] > 0
    for row in figures["rows"]:
        assert row["put_ratio"] == pytest.approx(row["put_gb_per_s"] / row["copy_gb_per_s"])
    assert "of a copy" in capsys.readouterr().out
