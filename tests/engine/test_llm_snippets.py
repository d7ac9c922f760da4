"""The usual snippets of the field: only the import and the model's name are changed."""

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def test_basic(model: str) -> None:
    from diptych import LLM, SamplingParams

    prompts = [
        "Hello, my name is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=model)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        assert f"Prompt: {prompt!r}, Generated text: {generated_text!r}"
    assert [output.prompt for output in outputs] == prompts
    assert all(output.outputs[0].token_ids for output in outputs)


def test_prefix_caching(model: str) -> None:
    from diptych import LLM, SamplingParams

    prefix = (
        "You are an expert school principal, skilled in effectively managing "
        "faculty and staff. Draft 10-15 questions for a potential first grade "
        "Head Teacher for my K-12, all-girls', independent school that emphasizes "
        "community, joyful discovery, and life-long learning. "
    )
    prompts = ["Hello, my name is", "The president of the United States is"]
    generating_prompts = [prefix + prompt for prompt in prompts]
    sampling_params = SamplingParams(temperature=0.0)

    regular_llm = LLM(model=model, gpu_memory_utilization=0.3, enable_prefix_caching=False)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_generated_texts = [output.outputs[0].text for output in outputs]

    prefix_cached_llm = LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    cached_generated_texts = [output.outputs[0].text for output in outputs]

    assert regular_generated_texts == cached_generated_texts
    assert all(output.num_cached_tokens >= 64 for output in outputs)


def test_shared_storage(model: str, tmp_path: Path) -> None:
    from diptych import LLM, KVTransferConfig, SamplingParams

    context = "Hi " * 200
    ktc = KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path / "local_storage")},
    )

    producer = LLM(
        model=model,
        enforce_eager=True,
        gpu_memory_utilization=0.8,
        kv_transfer_config=ktc,
    )
    prompt = context + "Hello, my name is"
    first = producer.generate([prompt], SamplingParams(temperature=0, top_p=0.95, max_tokens=1))
    producer.shutdown()
    handed_over = first[0].prompt + first[0].outputs[0].text

    consumer = LLM(
        model=model,
        enforce_eager=True,
        gpu_memory_utilization=0.8,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        kv_transfer_config=ktc,
    )
    params = SamplingParams(temperature=0, top_p=0.95, max_tokens=10)
    second = consumer.generate([handed_over], params)
    plain = LLM(model=model).generate([handed_over], params)
    assert second[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert second[0].num_cached_tokens >= 64
    assert plain[0].num_cached_tokens == 0


def test_the_offline_example(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _example("offline")["main"](model)
    assert "'The capital of France is' -> " in capsys.readouterr().out


def test_the_async_example(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_example("offline_async")["main"](model))
    assert "'The capital of France is' + " in capsys.readouterr().out


def _example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))
