import json
from pathlib import Path

import pytest

from diptych.cli import main


def test_each_transport_is_measured_against_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = ["--transport", "shm", "tcp", "--run-bytes=65536", "--set-bytes=1048576", "--rounds=1"]
    assert main(["bench", "transport", *flags, "--output-json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["transport"], row["case"]) for row in rows] == [
        ("shm", "64 KiB adjacent"),
        ("shm", "64 KiB scattered"),
        ("tcp", "64 KiB adjacent"),
        ("tcp", "64 KiB scattered"),
    ]
    for row in rows:
        assert row["copy_ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
    assert "of a copy" in capsys.readouterr().out
