"""Requests are admitted where what all are expected to write will fit."""

from __future__ import annotations

import pytest

from diptych.engine.expected_output import ExpectedOutput
from diptych.engine.scheduler_request import SchedulerRequest
from tests.engine.engine_driver import Driver
from tests.engine.make_requests import make_request

BLOCK = 16


def request(num_prompt: int = 32, **sampling) -> SchedulerRequest:
    made = make_request("a", list(range(num_prompt)), **sampling)
    return SchedulerRequest(made, arrival=1, namespace=b"", max_model_len=10_000)


def test_who_ignores_the_end_uses_the_limit() -> None:
    expected = ExpectedOutput(BLOCK)
    assert expected.tokens(request(max_tokens=100)) == 100
    assert expected.tokens(request(max_tokens=100, eos=[7])) == 100, "too few to save on"
    assert expected.tokens(request(max_tokens=4000, eos=[7])) == 400
    assert expected.tokens(request(max_tokens=9000, eos=[7])) == 409
    # the rest of the prompt, too
    assert expected.blocks([request(32, max_tokens=100)]) == -(-132 // BLOCK)
    assert expected.blocks([], [request(32, max_tokens=100)]) == -(-100 // BLOCK)


def test_the_share_of_the_limit_is_learnt() -> None:
    expected = ExpectedOutput(BLOCK)
    ended = request(max_tokens=1000, eos=[7])
    for token in range(700):
        ended.append_output(token + 20)
    for _ in range(200):
        expected.learn(ended)
        expected.learn(request(max_tokens=100))  # says nothing of others
    assert expected.share == pytest.approx(0.7, abs=0.01)
    assert expected.tokens(request(max_tokens=1000, eos=[7])) == pytest.approx(700, abs=10)
    assert expected.tokens(ended) == 0


def run(num_requests: int, *, num_blocks: int, **config) -> Driver:
    driver = Driver(num_blocks, enable_prefix_caching=False, **config)
    names = [f"{i}" for i in range(num_requests)]
    requests = [make_request(n, [int(n)] * 20, max_tokens=100) for n in names]
    driver.add(*requests)
    driver.run()
    assert all(len(driver.clients[name].output) == 100 for name in names)
    return driver


def test_a_crowd_with_known_ends_is_never_preempted() -> None:
    assert run(12, num_blocks=40, reserve_output=True).stats.num_preemptions == 0
    assert run(12, num_blocks=40, reserve_output=False).stats.num_preemptions > 5


def test_one_that_may_not_fit_starts_alone() -> None:
    """Its limit is beyond the pool, yet it may end before."""
    driver = Driver(num_blocks=4, reserve_output=True)
    prompts = {"a": [1] * 20, "b": [2] * 20}
    driver.add(*[make_request(n, p, max_tokens=1000, eos=[5]) for n, p in prompts.items()])
    driver.step()
    assert driver.stats.num_running == 1
