"""Planning ahead changes no answer: a model on a CPU, whose steps end as they are submitted but
whose tokens the host still learns a step late."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, SamplingParams
from tests.engine.runner_driver import RunnerDriver
from tests.engine.test_graphs import CapturedDriver, capture_on_a_cpu
from tests.tiny_models import make_tiny_model

KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "seeded": [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.1, "top_p": 0.9}],
    "stops": [
        {"temperature": 0.0, "stop_token_ids": list(range(0, 384, 7))},
        {"temperature": 1.0, "stop_token_ids": list(range(0, 384, 9))},
        {"temperature": 1.0, "top_k": 20, "stop_token_ids": list(range(1, 384, 11))},
    ],
    "history": [
        {"temperature": 0.0},
        {"temperature": 0.0, "frequency_penalty": 0.8},
        {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 1.0, "logit_bias": {7: 3.0}},
        {"temperature": 0.7, "prompt_logprobs": 1},
        {"temperature": 0.0, "bad_words_token_ids": [[i, i] for i in range(384)]},
    ],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempted": {
        "num_kv_blocks": 20,
        "enable_prefix_caching": False,
        "reserve_output": False,
    },
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


def answers(
    model: Path,
    kinds: list[dict[str, Any]],
    *,
    ahead: bool,
    captured: bool = False,
    **settings: Any,
) -> list[Any]:
    """What comes of requests of which many share a prefix."""
    rng = random.Random(1)
    values = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 6}
    with LLM(str(model), async_scheduling=ahead, **values | settings) as llm:
        if captured:
            capture_on_a_cpu(llm._core._executor)
        vocab = range(10, llm.model_config.vocab_size)
        shared = rng.choices(vocab, k=40)
        prompts = [
            {"prompt_token_ids": shared[: 20 * (i % 3)] + rng.choices(vocab, k=rng.randint(1, 50))}
            for i in range(13)
        ]
        params = [
            SamplingParams(
                seed=i,
                max_tokens=1 + 3 * i,
                min_tokens=i,
                ignore_eos=True,
                **kinds[i % len(kinds)],
            )
            for i in range(13)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm._core.stats
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
        assert stats.generation_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    return [(o.prompt_logprobs, o.outputs[0]) for o in outputs]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_steps_planned_ahead_answer_as_others(model: Path, kinds: Any, settings: Any) -> None:
    plain = answers(model, kinds, ahead=False, **settings)
    for ours, theirs in zip(answers(model, kinds, ahead=True, **settings), plain, strict=True):
        assert list(ours[1].token_ids) == list(theirs[1].token_ids)
        assert ours[1].finish_reason == theirs[1].finish_reason
        assert ours[1].stop_reason == theirs[1].stop_reason
        for logprobs, expected in ((ours[1].logprobs, theirs[1].logprobs), (ours[0], theirs[0])):
            assert [known and list(known) for known in logprobs or []] == [
                known and list(known) for known in expected or []
            ]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_so_do_captured_steps_of_every_kind(model: Path, settings: Any) -> None:
    """Rows stay where graphs would have them, while steps of other kinds come between."""
    kinds = [kind for group in KINDS.values() for kind in group]
    plain = answers(model, kinds, ahead=False, **settings)
    ours = answers(model, kinds, ahead=True, captured=True, **settings)
    for got, want in zip(ours, plain, strict=True):
        assert list(got[1].token_ids) == list(want[1].token_ids)
        assert got[1].finish_reason == want[1].finish_reason
        assert (got[0] is None) == (want[0] is None)


@pytest.mark.parametrize("make_driver", [RunnerDriver, CapturedDriver])
def test_a_step_takes_its_token_from_the_device(model: Path, make_driver: Any) -> None:
    """Two steps are submitted before the host has seen the token of the first."""
    prompts = {"a": [7, 8, 9], "b": list(range(30, 50))}
    params = SamplingParams(temperature=0.9, seed=3)
    expected = {}
    for name, prompt in prompts.items():
        plain = RunnerDriver(model)
        plain.add(name, prompt, params)
        expected[name] = plain.decode(name, 9)
    driver = make_driver(model)
    for name, prompt in prompts.items():
        driver.add(name, prompt, params)
    found: dict[str, list[int]] = {"a": [], "b": []}
    handle = driver.submit({"a": 3, "b": 20})
    for _ in range(8):
        following = driver.submit({"a": 1, "b": 1})
        for name, tokens in handle.result().sampled_token_ids.items():
            found[name] += tokens
        handle = following
    for name, tokens in handle.result().sampled_token_ids.items():
        found[name] += tokens
    assert found == expected


def test_a_late_token_is_not_written_into_a_row_that_another_has_entered(model: Path) -> None:
    driver = RunnerDriver(model, max_num_seqs=1)
    driver.add("a", [7, 8, 9])
    handle = driver.submit({"a": 3})
    driver.finish("a")
    driver.add("b", [5] * 20)
    following = driver.submit({"b": 20})
    handle.result()
    following.result()
    runner = driver.executor._runner
    assert runner is not None
    assert runner._batch.token_ids[0, :20].tolist() == [5] * 20
