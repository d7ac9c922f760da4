"""Prompts, and the answers that must be equal on every path."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cluster import Api

of_every_sampling = pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 11},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    ],
    ids=["greedy", "seeded", "penalties"],
)


def prompt(num_tokens: int, salt: int) -> list[int]:
    """Token ids; two salts have no prefix in common that could be cached."""
    return random.Random(salt).choices(range(3, 200), k=num_tokens)


def normal(answer: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on every path; cached tokens depend on the path."""
    usage = {k: v for k, v in answer["usage"].items() if k.endswith("_tokens")}
    choice = {k: v for k, v in answer["choices"][0].items() if k != "logprobs"}
    return {"usage": usage, "choice": choice}


def check_equal(split: Api, whole: Api, num_tokens: int, sampling: dict[str, Any]) -> None:
    """Both give one answer, and log probabilities within 1e-4."""
    ids = prompt(num_tokens, salt=1000 + num_tokens)
    fields = {**sampling, "max_tokens": 16, "logprobs": 2, "return_token_ids": True}
    answers = split.complete(ids, **fields), whole.complete(ids, **fields)
    assert normal(answers[0]) == normal(answers[1])
    ours, theirs = (a["choices"][0]["logprobs"]["token_logprobs"] for a in answers)
    assert ours == pytest.approx(theirs, abs=1e-4)


def check_side_by_side(api: Api) -> None:
    """Sixteen requests at once get the answers that each gets alone."""

    def answer(number: int) -> str:
        ids = prompt(1 + 9 * number, salt=2000 + number)
        body = api.complete(ids, max_tokens=12, seed=number, ignore_eos=True)
        return str(body["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, range(16)))
    assert together == [answer(number) for number in range(16)]
