"""Clients leave in every phase; one whose router dies after token 1 asks another."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.faults.clients import QUESTIONS, Question, ask, asking
from tests.faults.deployment import Deployment
from tests.faults.phases import DIRECT_PHASES, STORE_PHASES, Phase

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

LONG = Question(QUESTIONS[2].prompt, max_tokens=150)


class Leaving:
    """A client that asks, and closes its connection when it is told to."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._leave = threading.Event()

    def ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=180)
        connection.connect()
        with contextlib.closing(connection):
            body = LONG.body()
            connection.request("POST", "/v1/completions", json.dumps(body))
            self._wait(connection.sock)

    def _wait(self, connection: socket.socket) -> None:
        """Until it is told to leave, or has the whole answer."""
        answer, until = b"", time.monotonic() + 240
        while not self._leave.wait(0.01) and time.monotonic() < until:
            if select.select([connection], [], [], 0)[0]:
                piece = connection.recv(1 << 16)
                answer += piece
                if not piece or b"[DONE]" in answer:
                    return

    def leave(self) -> None:
        self._leave.set()


@pytest.mark.parametrize("phase", STORE_PHASES, ids=str)
def test_a_client_that_leaves_leaves_nothing_behind(system: Deployment, phase: Phase) -> None:
    leave_at(system, phase)


@pytest.mark.parametrize("phase", DIRECT_PHASES, ids=str)
def test_a_client_that_leaves_in_a_direct_hand_off_leaves_nothing_behind(
    direct: Deployment, phase: Phase
) -> None:
    leave_at(direct, phase)


def leave_at(system: Deployment, phase: Phase) -> None:
    """Its request is at the phase when the client closes its connection."""
    client = Leaving(system.ports["router-0"])
    with system.pausing(*phase) as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(client.ask))
        client.leave()
        asked.result(240)
        pause.release()
    system.check_nothing_leaks()
    system.check_right(QUESTIONS[2])


def test_a_router_killed_after_token_1_leaves_its_clients_to_another(system: Deployment) -> None:
    """Neither decode worker begins before it is killed, for the first might be given up."""
    question = QUESTIONS[2]
    with ExitStack() as stack:
        for name in system.of_role("decode"):
            stack.enter_context(system.pausing(name, "worker.admitted"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        first = threading.Event()
        port = system.ports["router-0"]
        asked = pool.submit(ask, port, question, lambda text: first.set())
        assert first.wait(120), "token 1 is out before decode has begun"
        system.send("router-0", signal.SIGKILL)
        answer = asked.result(240)
    assert answer.broken
    assert not answer.ended
    assert system.expected[question].startswith(answer.text)
    system.check_right(question, router=1)


def test_many_clients_that_leave_at_once_leave_nothing_behind(system: Deployment) -> None:
    def leave_early(number: int) -> None:
        with asking(system.ports[f"router-{number % 2}"], LONG) as response:
            for _ in range(number % 7):
                response.readline()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave_early, range(64)))
    system.check_nothing_leaks()
    system.check_right(QUESTIONS[1])
