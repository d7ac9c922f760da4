"""The directory is killed, flushed and frozen: requests go on, and all is found again after it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import until
from tests.faults.clients import QUESTIONS
from tests.faults.deployment import LIVENESS_S, Deployment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def ready_workers(system: Deployment) -> list[float]:
    routers = system.of_role("router").values()
    return [router.metric("diptych:workers_ready") for router in routers]


def test_requests_go_on_while_redis_is_dead_and_all_is_found_after_it(system: Deployment) -> None:
    system.send("redis", signal.SIGKILL)
    for question in QUESTIONS:
        system.check_right(question)
    system.restore()
    for question in QUESTIONS:
        system.check_right(question, router=1)


def test_a_worker_that_starts_after_redis_came_back_is_found(system: Deployment) -> None:
    system.send("redis", signal.SIGKILL)
    system.send("decode-0", signal.SIGKILL)
    system.check_right(QUESTIONS[1])
    system.restore()
    until(lambda: ready_workers(system) == [3, 3], "all workers are there")
    system.check_right(QUESTIONS[1])


def test_a_flushed_redis_is_filled_again(system: Deployment) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(system.ask, QUESTIONS[n % 3]) for n in range(12)]
        system.flush_redis()
        answers = [each.result(240) for each in asked]
    for number, answer in enumerate(answers):
        assert answer.is_right(system.expected[QUESTIONS[number % 3]]), answer
    until(lambda: ready_workers(system) == [3, 3], "all workers are there")


def test_a_frozen_redis_costs_no_request(system: Deployment) -> None:
    system.send("redis", signal.SIGSTOP)
    try:
        for _ in range(int(LIVENESS_S) + 1):
            for question in QUESTIONS:
                system.check_right(question)
    finally:
        system.send("redis", signal.SIGCONT)
    until(lambda: ready_workers(system) == [3, 3], "all workers are there")
