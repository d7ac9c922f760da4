"""Steps planned while others run give the tokens of steps that are waited for."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych import LLM, SamplingParams
from tests.engine.runner_driver import RunnerDriver
from tests.gpu.test_graphs import GREEDY, MIXED, PLAIN, SETTINGS
from tests.tiny_models import make_tiny_model

STOPS = [
    {"temperature": 0.0, "stop_token_ids": list(range(0, 384, 7))},
    {"temperature": 1.0, "stop_token_ids": list(range(1, 384, 11))},
]
KINDS = {"greedy": GREEDY, "plain": PLAIN, "mixed": MIXED, "stops": STOPS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


def answers(model: Path, kinds: list[dict[str, Any]], **settings: Any) -> list[Any]:
    """Tokens and ends of requests that come to be in the batch and leave it at other times."""
    rng = random.Random(1)
    defaults = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,  # so that several of these run at once
    }
    with LLM(str(model), **defaults | settings) as llm:
        vocab = range(10, llm.model_config.vocab_size)
        shared = rng.choices(vocab, k=70)
        prompts = [
            {"prompt_token_ids": shared[: 35 * (i % 3)] + rng.choices(vocab, k=rng.randint(1, 60))}
            for i in range(27)
        ]
        params = [
            SamplingParams(
                seed=i, max_tokens=5 + rng.randint(1, 60), ignore_eos=True, **kinds[i % len(kinds)]
            )
            for i in range(27)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm._core.stats
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
    ends = [output.outputs[0] for output in outputs]
    return [(list(e.token_ids), e.finish_reason, e.stop_reason) for e in ends]


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_overlapped_steps_give_the_same_tokens(model, kinds, settings) -> None:
    waited = answers(model, kinds, async_scheduling=False, **settings)
    assert answers(model, kinds, async_scheduling=True, **settings) == waited


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_so_do_overlapped_steps_without_graphs(model, kinds) -> None:
    settings = SETTINGS["preempted"] | {"enforce_eager": True}
    waited = answers(model, kinds, async_scheduling=False, **settings)
    assert answers(model, kinds, async_scheduling=True, **settings) == waited


def test_a_steady_step_is_submitted_without_waiting_for_the_one_before(model) -> None:
    """Its inputs, block tables and the token of the step before come without the host."""
    driver = RunnerDriver(model, device="cuda", dtype="float32", num_kv_blocks=64, block_size=16)
    for i in range(5):
        driver.add(f"{i}", [7 + i, 8, 9], SamplingParams(temperature=0.7 * (i % 2), seed=i))
    step = {f"{i}": 1 for i in range(5)}
    driver.step(dict.fromkeys(step, 3))
    driver.step(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            handle = driver.submit(step)
            for _ in range(40):
                following = driver.submit(step)
                handle.result()
                handle = following
            handle.result()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_results_of_a_step_do_not_wait_for_the_next(model) -> None:
    """The next step is on its way, and the device held up before it."""
    driver = RunnerDriver(model, device="cuda", dtype="float32", num_kv_blocks=64)
    driver.add("a", [7, 8, 9], SamplingParams(temperature=0.0))
    driver.step({"a": 3})
    for _ in range(3):
        driver.step({"a": 1})
    first = driver.submit({"a": 1})
    torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
    held = torch.cuda.Event()
    held.record()
    second = driver.submit({"a": 1})
    assert first.result().sampled_token_ids.keys() == {"a"}
    assert not held.query()
    assert second.result().sampled_token_ids.keys() == {"a"}
    assert held.query()
