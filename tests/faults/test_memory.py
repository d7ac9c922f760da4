"""Faults again and again: memory of who lives through them is flat once it is warm."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.clients import QUESTIONS
from tests.faults.deployment import Deployment
from tests.faults.growth import LONGEST_WARM_UP_S, STEADY_S, Growth
from tests.faults.test_clients_gone import Leaving

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

# longer than any lease, and until routers take who is frozen for lost
STOPPED_S = 2.0
# `Growth` counts seconds of load; here a round of faults is so many
ROUND_S = STEADY_S / 8
JUDGED_ROUNDS = 8


def hurt(system: Deployment, frozen: str) -> None:
    """Somebody freezes while requests run, and a client leaves before it has its answer."""
    client = Leaving(system.ports["router-1"])
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(system.check_right, question) for question in QUESTIONS]
        asked.append(pool.submit(client.ask))
        system.send(frozen, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        client.leave()
        system.send(frozen, signal.SIGCONT)
        for each in asked:
            each.result(240)
    system.wait_whole()


def check_memory(system: Deployment, victims: Sequence[str]) -> None:
    """At most a twentieth more after eight rounds than when it had been steady for eight."""
    pids = {n: system.pid(n) for n in (*victims, *system.services) if n != "redis"}
    pids |= {f"{n}/engine": system.pid(f"{n}/engine") for n in system.workers()}
    num_rounds = 0
    growth = Growth(now=lambda: num_rounds * ROUND_S)
    turns = itertools.cycle(victims)

    def one_round() -> None:
        nonlocal num_rounds
        hurt(system, next(turns))
        num_rounds += 1
        growth.note(pids)

    while not growth.all_warm(pids) and num_rounds * ROUND_S <= LONGEST_WARM_UP_S:
        one_round()
    for _ in range(JUDGED_ROUNDS):
        one_round()
    assert not growth.grown(pids)


def test_faults_through_the_store_leave_memory_as_it_was(system: Deployment) -> None:
    check_memory(system, ["prefill-0", "decode-0", "kvstore-0", "decode-1/engine"])


def test_faults_from_worker_to_worker_leave_memory_as_it_was(direct: Deployment) -> None:
    check_memory(direct, ["prefill-0", "decode-0", "prefill-1/engine", "decode-1/engine"])
