"""Keys and values kept as e4m3: a quarter of float32's bytes, nearly the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych import LLM, KVTransferConfig, SamplingParams
from diptych.config import MIB, EngineConfig
from diptych.engine.executor import UniprocExecutor
from diptych.errors import ConfigError
from diptych.outputs import RequestOutput
from tests.tiny_models import make_tiny_model

PROMPTS = [
    "the capital of France is",
    "What is the weather in the mountains? It is raining there, they said. " * 3,
    "one, two, three,",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


def answers(model: Path, scored: int | None = None, **settings) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=scored)
    defaults = {"device": "cpu", "num_kv_blocks": 64, "kv_cache_dtype": "fp8"}
    with LLM(str(model), **defaults | settings) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(model: Path, **settings) -> torch.Tensor:
    """Of every prompt token."""
    outputs = answers(model, scored=0, **settings)
    return torch.tensor(
        [
            next(iter(at.values())).logprob
            for output in outputs
            for at in output.prompt_logprobs or ()
            if at is not None
        ]
    )


def executor(model: Path, **settings) -> UniprocExecutor:
    defaults = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64}
    return UniprocExecutor(EngineConfig(model=str(model), **defaults | settings))


def test_the_same_budget_holds_four_times_the_blocks_of_float32(model: Path) -> None:
    budget = {"num_kv_blocks": None, "cpu_kv_cache_bytes": MIB}
    plain = executor(model, **budget).kv_layout
    eight = executor(model, kv_cache_dtype="fp8", **budget).kv_layout
    assert (plain.dtype, eight.dtype) == ("float32", "float8_e4m3fn")
    assert eight.num_blocks == pytest.approx(4 * plain.num_blocks, abs=3)


def test_kv_of_another_type_has_another_name(model: Path) -> None:
    names = [
        executor(model, kv_cache_dtype=name).kv_namespace for name in ("auto", "fp8", "fp8_e4m3")
    ]
    assert names[0] != names[1] == names[2]
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3"):
        executor(model, kv_cache_dtype="fp8_e5m2")


def test_answers_are_near_those_of_float32_and_not_the_same(model: Path) -> None:
    plain = logprobs(model, kv_cache_dtype="auto")
    eight = logprobs(model)
    assert 1e-4 < (plain - eight).abs().mean() < 0.5


def test_chunks_batches_and_preemption_change_nothing(model: Path) -> None:
    whole = tokens(answers(model))
    assert tokens(answers(model, max_num_batched_tokens=16, enable_prefix_caching=False)) == whole
    assert tokens(answers(model, max_num_seqs=1)) == whole
    # room for the longest alone: the others are put off or taken out
    assert tokens(answers(model, num_kv_blocks=12, max_model_len=192)) == whole


def test_two_engines_share_pages_of_a_quarter_of_the_bytes(model: Path, tmp_path: Path) -> None:
    def transfer(role: str, folder: str) -> KVTransferConfig:
        extra = {"shared_storage_path": str(tmp_path / folder)}
        return KVTransferConfig(
            kv_connector="SharedStorageConnector", kv_role=role, kv_connector_extra_config=extra
        )

    alone = tokens(answers(model))
    sizes = {}
    for name in ("auto", "fp8"):
        config = {"kv_cache_dtype": name, "kv_transfer_config": transfer("kv_producer", name)}
        answers(model, **config)
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).rglob("*.kv"))
    consumer = answers(model, kv_transfer_config=transfer("kv_consumer", "fp8"))
    assert tokens(consumer) == alone
    assert max(output.num_cached_tokens or 0 for output in consumer) > 64
    # objects have a header each
    assert sizes["fp8"] < 0.35 * sizes["auto"]


def test_scales_of_the_checkpoint_are_applied_at_both_ends(model: Path, tmp_path: Path) -> None:
    plain = logprobs(model, kv_cache_dtype="auto")
    weights = load_file(model / "model.safetensors")
    scaled = make_tiny_model(tmp_path / "scaled")

    def near(scale: float, *names: str) -> float:
        extra = {
            f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
            for layer in range(3)
            for name in names
        }
        save_file(weights | extra, scaled / "model.safetensors")
        return float((logprobs(scaled) - plain).abs().mean())

    alone = float((logprobs(model) - plain).abs().mean())
    # powers of two round alike, but for the least numbers
    assert near(0.25, "k_scale", "v_scale") == pytest.approx(alone, rel=0.1)
    assert near(0.25, "k_proj.k_scale", "v_proj.v_scale") == pytest.approx(alone, rel=0.1)
    # so small a scale that all of it saturates
    assert near(1e-4, "k_scale") > 3 * alone
    assert near(1e-4, "v_scale") > 3 * alone
