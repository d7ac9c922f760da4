"""Decode steps in CUDA graphs give the tokens of the same steps one kernel after another."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from diptych import LLM, SamplingParams
from tests.engine.runner_driver import RunnerDriver
from tests.tiny_models import ARCHITECTURES, make_tiny_model

GREEDY = [{"temperature": 0.0}]
PLAIN = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3}]
MIXED = [
    *PLAIN,
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 9, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.8, "logprobs": 0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(50, 90)), "min_tokens": 5},
]
SETTINGS = {
    "padded": {"max_num_seqs": 7},
    "many-rows": {"max_num_seqs": 64},
    "small-blocks": {"block_size": 16, "max_num_seqs": 12},
    "preempted": {
        "block_size": 16,
        "num_kv_blocks": 24,
        "enable_prefix_caching": False,
        "reserve_output": False,
    },
    "chunked": {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


def answers(model: Path, kinds: list[dict], count: int, **settings) -> list:
    """Tokens and logprobs of `count` requests of different lengths, in a batch that changes."""
    rng = random.Random(1)
    defaults = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,  # so that several of these run at once
    }
    with LLM(str(model), **defaults | settings) as llm:
        vocab = range(10, llm.model_config.vocab_size)
        prompts = [
            {"prompt_token_ids": rng.choices(vocab, k=rng.randint(1, 100))} for _ in range(count)
        ]
        params = [
            SamplingParams(
                seed=i, max_tokens=rng.randint(1, 60), ignore_eos=True, **kinds[i % len(kinds)]
            )
            for i in range(count)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("kinds", [GREEDY, PLAIN, MIXED], ids=["greedy", "plain", "mixed"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_graphs_give_the_tokens_of_eager_steps(model, kinds, settings, monkeypatch) -> None:
    monkeypatch.setattr("diptych.engine.graphs._CONTEXTS", (40, 130))
    eager = answers(model, kinds, 27, enforce_eager=True, **settings)
    graphs = answers(model, kinds, 27, **settings)
    for ours, theirs in zip(graphs, eager, strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids)
        if theirs.logprobs is not None:
            for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert here.keys() == there.keys()
                for token, logprob in there.items():
                    assert here[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_captured(architecture, tmp_path) -> None:
    other = make_tiny_model(tmp_path / "m", architecture)
    eager, graphs = (
        [list(o.token_ids) for o in answers(other, PLAIN, 12, enforce_eager=flag)]
        for flag in (True, False)
    )
    assert graphs == eager


def driver_of(model: Path, **settings) -> RunnerDriver:
    return RunnerDriver(model, **{"device": "cuda", "dtype": "float32"} | settings)


def decoding(driver: RunnerDriver, count: int) -> dict[str, int]:
    """`count` requests past their prompts; what a step of all of them is."""
    for i in range(count):
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i)
        driver.add(f"{i}", [7 + i, 8, 9], params)
    names = {f"{i}": 1 for i in range(count)}
    driver.step(dict.fromkeys(names, 3))
    return names


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """But for the step's own wait, which torch does not count as one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_graphs_are_made_where_they_can_be(model) -> None:
    runner = driver_of(model).executor._runner
    assert runner._decode is not None
    assert runner._mixed is not None
    assert driver_of(model, enforce_eager=True).executor._runner._decode is None
    assert driver_of(model, attention_backend="torch").executor._runner._decode is None


def test_capture_leaves_the_cache_as_it_was(model) -> None:
    assert not driver_of(model).executor._runner._kv_cache.any()


def test_two_hundred_steps_allocate_nothing(model) -> None:
    driver = driver_of(model, num_kv_blocks=128)
    step = decoding(driver, 5)
    for _ in range(20):
        driver.step(step)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        driver.step(step)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_a_step_waits_for_its_tokens_alone(model) -> None:
    """Nothing hidden waits for the device, also where block tables grow."""
    driver = driver_of(model, num_kv_blocks=64, block_size=16)
    step = decoding(driver, 5)
    driver.step(step)
    with waiting_is_an_error():
        for _ in range(40):
            driver.step(step)


def test_a_steady_step_is_one_graph_and_one_copy_of_its_tokens(model) -> None:
    driver = driver_of(model, num_kv_blocks=128, block_size=64)
    step = decoding(driver, 5)
    for _ in range(3):
        driver.step(step)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(20):
            driver.step(step)
    counts = Counter(event.name for event in profile.events())
    assert counts["cudaGraphLaunch"] == 20
    assert counts["cudaMemcpyAsync"] == 20
    assert not [name for name in counts if "LaunchKernel" in name]


def test_prompts_in_a_graph_are_submitted_without_waiting(model) -> None:
    """Alone, in chunks and beside rows that decode, with parameters that enter and leave."""
    driver = driver_of(model, num_kv_blocks=256, block_size=16)
    step = decoding(driver, 5)
    driver.step(step)
    with waiting_is_an_error():
        for i in range(12):
            name = f"p{i}"
            driver.add(name, [7 + i] * 40, SamplingParams(**MIXED[i % 4], seed=i))
            handles = [driver.submit(step | {name: 25}), driver.submit(step | {name: 15})]
            driver.finish(name)
            for handle in handles:
                handle.result()
