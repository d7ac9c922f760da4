"""A result says where, when and by what it was measured."""

import json

import pytest

from diptych.bench.report import write_result


def test_a_result_carries_its_circumstances(tmp_path) -> None:
    path = write_result("latency", {"tpot_ms": [1.5]}, directory=tmp_path / "results")
    result = json.loads(path.read_text())
    assert result["tpot_ms"] == [1.5]
    assert result["device"]
    assert result["versions"]["python"]
    assert result["versions"]["torch"]
    assert {"date", "commit", "num_cpus"} <= result.keys()
    assert "latency" in path.name
    assert path.name.startswith(result["date"][:10])


def test_a_payload_cannot_hide_them(tmp_path) -> None:
    with pytest.raises(ValueError, match="device"):
        write_result("latency", {"device": "mine"}, directory=tmp_path)


def test_the_commit_may_be_named_from_outside(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DIPTYCH_COMMIT", "0123abc")
    path = write_result("latency", {}, directory=tmp_path)
    assert json.loads(path.read_text())["commit"] == "0123abc"
