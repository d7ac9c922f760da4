import json
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, SamplingParams
from diptych.cli import main
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def bench(kind: str, model: str, out: Path, *flags: str) -> dict[str, Any]:
    common = ["--model", model, "--device", "cpu", "--num-threads", "1", "--output-json", str(out)]
    assert main(["bench", kind, *common, *flags]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_latency_measures_a_batch(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--input-len=8", "--output-len=4", "--batch-size=2", "--num-iters-warmup=1"]
    figures = bench("latency", model, tmp_path / "out.json", *flags, "--num-iters=3")
    assert len(figures["latencies"]) == 3
    assert min(figures["latencies"]) <= figures["percentiles"]["50"] <= max(figures["latencies"])
    assert figures["output_tokens_per_s"] == pytest.approx(8 / figures["percentiles"]["50"])
    assert figures["total_tokens_per_s"] == pytest.approx(3 * figures["output_tokens_per_s"])
    assert figures["percentiles"]["50"] == pytest.approx(
        figures["times_floor"] * figures["floor_s"]
    )
    assert min(figures["tb_per_s"], figures["tflop_per_s"]) > 0
    assert figures["settings"]["batch_size"] == 2
    assert {"device", "versions", "commit"} <= figures.keys()
    assert "Avg latency" in capsys.readouterr().out


def test_random_weights_need_no_files_of_weights(model: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(model).glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    flags = ["--load-format=dummy", "--num-iters=1", "--num-iters-warmup=0", "--output-len=2"]
    assert bench("latency", str(bare), tmp_path / "out.json", *flags)["latencies"]


@pytest.mark.filterwarnings("default")
def test_latency_compares_with_transformers(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = ["--compare=transformers", "--input-len=8", "--output-len=4", "--num-iters=1"]
    figures = bench("latency", model, tmp_path / "out.json", *flags, "--num-iters-warmup=0")
    assert list(figures["rates"]) == ["transformers b=1", "diptych b=1", "diptych b=8"]
    assert figures["rates"]["transformers b=1"]["ratio"] == 1.0


def test_throughput_counts_all_tokens(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts=5", "--input-len=12", "--output-len=3"]
    figures = bench("throughput", model, tmp_path / "out.json", *flags)
    assert figures["num_requests"] == 5
    assert figures["total_num_tokens"] == 5 * 15
    assert figures["elapsed_time"] == pytest.approx(figures["times_floor"] * figures["floor_s"])
    assert "Throughput:" in capsys.readouterr().out


def test_throughput_reads_sharegpt(model: str, tmp_path: Path) -> None:
    def turns(question: str, answer: str) -> dict[str, Any]:
        return {"conversations": [{"value": question}, {"value": answer}]}

    data = [turns("What is the weather in the mountains?", "It is raining there."), turns("x", "y")]
    data.append({"conversations": [{"value": "alone"}]})
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(data))
    flags = ["--dataset-name=sharegpt", f"--dataset-path={file}"]
    figures = bench("throughput", model, tmp_path / "out.json", *flags)
    assert figures["num_requests"] == 1, "one is too short, one has no answer"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_dataset_is_named(model: str, tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--model", model]
    assert main(["bench", "throughput", "--device=cpu", *flags]) != 0


def test_a_config_alone_is_enough(model: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    flags = ["--load-format=dummy", "--num-prompts=3", "--input-len=8", "--output-len=2"]
    figures = bench("throughput", str(bare), tmp_path / "out.json", *flags, "--block-size=32")
    assert figures["total_num_tokens"] == 30
    rates = [figures[f"{kind}tokens_per_second"] for kind in ("input_", "output_", "")]
    assert rates[0] + rates[1] == pytest.approx(rates[2])
    assert figures["settings"]["engine.block_size"] == "32"


def test_an_unknown_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--model=shape:none", "--device=cpu"]) == 1
    assert "llama-3.1-8b, qwen3-8b" in capsys.readouterr().err


def test_start_up_is_the_sum_of_its_parts(model: str, tmp_path: Path) -> None:
    figures = bench("startup", model, tmp_path / "out.json")
    parts = [figures[name] for name in ("own_imports_s", "torch_import_s", "engine_s")]
    assert sum(parts) == pytest.approx(figures["ready_s"])


def test_random_weights_are_written_as_they_would_be_drawn(tmp_path: Path, model: str) -> None:
    written = tmp_path / "written"
    flags = ["--device=cpu", "--load-format=dummy", f"--write-weights={written}"]
    assert main(["bench", "startup", "--model", model, *flags]) == 0
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for directory, load_format in ((model, "dummy"), (str(written), "auto")):
        with LLM(directory, load_format=load_format, device="cpu", num_threads=1) as llm:
            answers.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert main(["bench", "startup", "--model", model, *flags]) == 1, "nothing is overwritten"
