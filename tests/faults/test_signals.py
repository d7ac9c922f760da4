"""kill -9 and SIGSTOP/SIGCONT of each process at each phase of a hand-off, on both paths."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

import pytest

from tests.faults.clients import QUESTIONS, Answer
from tests.faults.deployment import Deployment
from tests.faults.phases import DIRECT_PHASES, STORE_PHASES, Hurt, Phase, cases

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

# longer than any lease
STOPPED_S = 2.5
QUESTION = QUESTIONS[2]


def awaited(system: Deployment, hurt: Hurt, victim: str, answer: Future[Answer]) -> Answer:
    """The answer; who was stopped goes on when it is there, or after a while without it."""
    if hurt.number is signal.SIGSTOP:
        with contextlib.suppress(Late):
            answer.result(STOPPED_S)
        system.send(victim, signal.SIGCONT)
    return answer.result(240)


def check(system: Deployment, hurt: Hurt) -> None:
    """The answer is that of a clean run, or the client is told that there is none."""
    with system.pausing(*hurt.phase) as pause, ThreadPoolExecutor(1) as pool:
        name, asked = pause.reached_by(lambda: pool.submit(system.ask, QUESTION))
        victim = hurt.victim.replace("self", name)
        if victim.startswith("source"):
            victim = victim.replace("source", system.holder("prefill"))
        system.send(victim, hurt.number)
        pause.release()
        answer = awaited(system, hurt, victim, asked)
    expected = system.expected[QUESTION]
    if victim == "router-0" and hurt.number is signal.SIGKILL:
        assert expected.startswith(answer.text)
        answer = system.ask(QUESTION, router=1)
    assert answer.is_right(expected) or answer.is_clean_error(expected), answer
    if not victim.startswith("router"):
        assert answer.is_right(expected), answer


@pytest.mark.parametrize("hurt", cases(), ids=str)
def test_through_the_store_the_answer_survives_and_nothing_leaks(
    system: Deployment, hurt: Hurt
) -> None:
    check(system, hurt)


@pytest.mark.parametrize("hurt", cases(direct=True), ids=str)
def test_from_worker_to_worker_the_answer_survives_and_nothing_leaks(
    direct: Deployment, hurt: Hurt
) -> None:
    check(direct, hurt)


def pass_in_peace(system: Deployment, phases: Iterable[Phase]) -> None:
    """So that a phase which is no more cannot leave tests without a fault."""
    for phase in phases:
        with system.pausing(*phase) as pause, ThreadPoolExecutor(1) as pool:
            _, asked = pause.reached_by(lambda: pool.submit(system.ask, QUESTION))
            pause.release()
            answer = asked.result(240)
        assert answer.is_right(system.expected[QUESTION]), phase


def test_every_phase_of_the_store_is_passed_in_peace(system: Deployment) -> None:
    pass_in_peace(system, STORE_PHASES)


def test_every_phase_of_direct_hand_offs_is_passed_in_peace(direct: Deployment) -> None:
    pass_in_peace(direct, DIRECT_PHASES)
