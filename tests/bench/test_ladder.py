"""A ladder measures what it is asked for, keeps its record, and draws it again."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from diptych.bench import ladder_table, peer_vllm
from diptych.bench.ladder import POINTS
from diptych.bench.ladder_record import DecodeRow, Ladder
from diptych.bench.points import Point, parse_point, parse_points
from diptych.bench.roofline import Roofline
from diptych.bench.startup import StartUp, process_age_s
from diptych.cli import main
from diptych.errors import ConfigError
from diptych.models.config import ModelConfig
from tests.bench.test_roofline import SHAPES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a small ladder of a model that is only a config.json."""
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    flags = ["--points=1@8,3@8", "--prefill=2x20", "--latency=2x4+6", "--throughput=5x9+3"]
    engine = [f"--model={folder}", "--load-format=dummy", "--device=cpu", "--num-threads=1"]
    assert main(["bench", "ladder", *flags, *engine, f"--result-dir={folder / 'results'}"]) == 0
    (path,) = (folder / "results").glob("*.json")
    return path


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_figures_of_fp8_have_a_record_of_their_own(record: Path, tmp_path: Path) -> None:
    flags = ["--points=1@8", "--prefill", "--latency", "--throughput", "--device=cpu"]
    eight = ["--quantization=fp8", "--kv-cache-dtype=fp8", "--num-threads=1"]
    model = [f"--model={record.parents[1]}", "--load-format=dummy", f"--result-dir={tmp_path}"]
    assert main(["bench", "ladder", *flags, *eight, *model]) == 0
    (path,) = tmp_path.glob("*-ladder-fp8-fp8kv-*.json")
    found = read(path)
    assert found["peer"] is None
    assert found["settings"]["engine.quantization"] == "fp8"
    sizes = {name: found["roofline"][name] for name in ("weight_bytes", "head_bytes", "kv_bytes")}
    assert sizes == {"weight_bytes": 1, "head_bytes": 4, "kv_bytes": 1}


def test_tpot_is_the_difference_of_the_best_runs(record: Path) -> None:
    rows = read(record)["decode"]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 8), (3, 8)]
    for row in rows:
        assert len(row["short_s"]) == len(row["long_s"]) == 2
        tpot_s = (min(row["long_s"]) - min(row["short_s"])) / 128
        assert row["tpot_s"] == pytest.approx(tpot_s)
        assert row["times_floor"] == pytest.approx(row["tpot_s"] / row["floor_s"])


def test_the_record_says_what_was_measured(record: Path) -> None:
    found = read(record)
    assert {"date", "commit", "versions", "device", "settings"} <= found.keys()
    (prefill,) = found["prefill"]
    assert prefill["tokens_per_s"] == pytest.approx(40 / prefill["time_s"])
    (latency,) = found["latency"]
    assert (latency["batch"], latency["input_len"], latency["output_len"]) == (2, 4, 6)
    (throughput,) = found["throughput"]
    assert throughput["total_tokens_per_s"] == pytest.approx(60 / throughput["time_s"])
    assert found["start_up"]["ready_s"] > 0
    assert found["saturation_batch"]["predicted"] > 0
    assert found["peer"] is None, "the peer's figures are of another model"
    assert found["skipped"] == []


def test_a_record_can_be_shown_again(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ladder", f"--from-json={record}"]) == 0
    out = capsys.readouterr().out
    for part in ("own imports", "2 x 20", "2 x 4 + 6", "5x9+3 total", "3 @ 8", "saturation batch"):
        assert part in out
    assert ("no plot" in out) == (find_spec("matplotlib") is None)


def test_a_record_is_a_table_in_markdown(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ladder", f"--from-json={record}", "--markdown"]) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|") == 6
    assert [row.split("|")[1].strip() for row in rows[:3]] == [
        "start-up, s: own imports",
        "start-up, s: engine ready",
        "prefill, ms: 2 x 20",
    ]
    assert all(row.count("|") == 6 for row in rows)


@pytest.mark.filterwarnings("default")
def test_the_plot_is_a_png(record: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = record.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_the_budget_does_not_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = [f"--model={tmp_path}", "--load-format=dummy", "--device=cpu", "--num-threads=1"]
    flags = ["--points=1@8", "--prefill=1x8", "--latency", "--throughput", "--budget-s=0"]
    assert main(["bench", "ladder", *engine, *flags, f"--result-dir={tmp_path}"]) == 0
    assert "1 x 8 left out" in capsys.readouterr().out
    (path,) = tmp_path.glob("*ladder*.json")
    assert read(path)["skipped"] == ["1 x 8", "1 x 8"]


def test_points_are_read() -> None:
    assert parse_point("8@1k") == Point(8, 1024)
    assert parse_point("4@32000") == Point(4, 32000)
    assert parse_point("16x1024") == Point(16, 1024)
    assert parse_point("8x32+128") == Point(8, 32, 128)


@pytest.mark.parametrize("text", ["8", "0@8", "8@", "8@1m", "8x4+0"])
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no point"):
        parse_point(text)


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ladder", "--points", "--prefill", "--latency", "--throughput"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_a_broken_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{}")
    assert main(["bench", "ladder", f"--from-json={file}"]) == 1
    assert "broken.json" in capsys.readouterr().err


def test_the_peer_has_a_figure_for_every_default_row() -> None:
    points = {kind: set(parse_points(texts)) for kind, texts in POINTS.items()}
    assert {(p.batch, p.length) for p in points["decode"]} == peer_vllm.TPOT_MS.keys()
    assert {(p.batch, p.length) for p in points["prefill"]} == peer_vllm.PREFILL_MS.keys()
    assert points["latency"] == peer_vllm.LATENCY_MS.keys()
    rates = peer_vllm.TOTAL_TOKENS_PER_S.keys() | peer_vllm.OUTPUT_TOKENS_PER_S.keys()
    assert points["throughput"] == rates


def test_a_record_is_resumed(record: Path, tmp_path: Path) -> None:
    folder = str(record.parent.parent)
    flags = ["--points=1@8,2@9", "--prefill=2x20", "--latency", "--throughput=5x9+3"]
    engine = [f"--model={folder}", "--load-format=dummy", "--device=cpu", "--num-threads=1"]
    more = [f"--resume={record}", f"--result-dir={tmp_path}"]
    assert main(["bench", "ladder", *flags, *engine, *more]) == 0
    (path,) = tmp_path.glob("*.json")
    found, before = read(path), read(record)
    assert found["decode"][:2] == before["decode"]
    assert [(row["batch"], row["context"]) for row in found["decode"]] == [(1, 8), (3, 8), (2, 9)]
    for kind in ("prefill", "latency", "throughput"):
        assert found[kind] == before[kind]


def test_peer_goal_and_floor_stand_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig.from_directory(SHAPES / "llama-3.1-8b")
    ladder = Ladder(
        roofline=Roofline(model=model),
        start_up=StartUp(own_imports_s=0.8, torch_import_s=3.0, engine_s=20.0),
        device="cuda",
        device_name="NVIDIA H200",
        peer=True,
    )
    for batch, tpot_ms in ((1, 4.4), (256, 17.0)):
        row = DecodeRow(
            batch=batch,
            context=1024,
            tpot_s=tpot_ms / 1e3,
            short_s=[1.0],
            long_s=[2.0],
            floor_s=ladder.roofline.decode_s(batch, 1024),
            mean_context=1104,
        )
        ladder.decode.append(row)
    ladder_table.show(ladder)
    out = capsys.readouterr().out.splitlines()
    (line,) = [line for line in out if line.startswith("1 @ 1024")]
    assert line.split()[3:8] == ["4.400", "4.985", "4.450", "3.522", "1.25"]
    assert out[-2:] == [
        "goals met: 2 of 4, beyond them: 0",
        "missed: start engine ready, decode 256 @ 1024",
    ]
    again = Ladder.from_json(json.loads(json.dumps(ladder.to_json())))
    assert again.decode == ladder.decode
    assert again.saturation() == ladder.saturation()


def test_a_process_knows_its_age() -> None:
    assert 0 < process_age_s() < 3600


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    """The second point does not fit the context that the flags set."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = [f"--model={tmp_path}", "--load-format=dummy", "--device=cpu", "--num-threads=1"]
    flags = ["--points", "--prefill=1x8,1x200", "--latency", "--throughput", "--max-model-len=160"]
    assert main(["bench", "ladder", *engine, *flags, f"--result-dir={tmp_path}"]) == 1
    (path,) = tmp_path.glob("*ladder*.json")
    assert [row["input_len"] for row in read(path)["prefill"]] == [8]
