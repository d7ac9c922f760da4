"""What happens to KV and to words on their way from worker to worker, with a proxy on every way:
flipped bytes, slow lines, partitions, a slow directory. And the ways that are left, in their order.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import until
from tests.faults.clients import QUESTIONS
from tests.faults.conftest import restored
from tests.faults.damage import spoil_pool
from tests.faults.deployment import Deployment, Shape, deployed
from tests.faults.proxy import Proxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

QUESTION = QUESTIONS[2]
TRANSPORTS = {"decode-0": "tcp", "decode-1": "grpc", "decode-2": "shm"}
SLOW_BYTES_PER_S = 64 << 10
CORRUPT = "diptych:kv_corrupt_total"


@pytest.fixture(scope="module")
def shared_wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two prefill workers and three decode workers, one for each transport, and a store."""
    shape = Shape(
        prefill=2,
        decode=3,
        routers=1,
        handoff="auto",
        proxied=True,
        transports={"prefill-0": "shm,tcp,grpc", "prefill-1": "shm,tcp,grpc", **TRANSPORTS},
    )
    with deployed(tmp_path_factory.mktemp("wires"), shape) as made:
        # every worker has gone every way once: what that opens stays open
        wait_direct(made)
        with apart(made):
            wait_handed(made, "decode")
        wait_direct(made)
        made.note_anew()
        yield made


@pytest.fixture
def wires(shared_wires: Deployment) -> Iterator[Deployment]:
    """The system; before and after the test every decode worker takes KV directly."""
    wait_direct(shared_wires)
    yield from restored(shared_wires)


def attempts(system: Deployment, stage: str) -> float:
    return system.services["router-0"].metric("diptych:attempts_total", stage=stage)


def submitted(system: Deployment, name: str) -> float:
    return system.services[name].metric("diptych:requests_submitted_total")


def handed(system: Deployment, name: str) -> float:
    """Prompt tokens whose KV a decode worker was given."""
    return system.services[name].prompt_tokens("external_kv_transfer")


def wait_direct(system: Deployment) -> None:
    """Ask until every decode worker has read a prefill worker's memory."""
    wait_handed(system, "pair")


def wait_handed(system: Deployment, stage: str) -> None:
    """Ask until every decode worker has been handed KV in such an attempt."""
    left = {name: handed(system, name) for name in TRANSPORTS}

    def all_handed() -> bool:
        before = attempts(system, stage)
        system.check_right(QUESTIONS[0])
        for name, at in list(left.items()):
            if handed(system, name) > at and attempts(system, stage) > before:
                del left[name]
            else:
                left[name] = handed(system, name)
        return not left

    until(all_handed, f"all are handed KV: {stage}", 240)


def kv_proxies(system: Deployment) -> list[Proxy]:
    return [p for name, found in system.proxies.items() if name.endswith("/kv") for p in found]


@contextlib.contextmanager
def flipping(system: Deployment) -> Iterator[None]:
    for proxy in kv_proxies(system):
        proxy.flip_down = True
    try:
        yield
    finally:
        for proxy in kv_proxies(system):
            proxy.flip_down = False


@pytest.mark.parametrize("name", ["decode-0", "decode-1"], ids=["tcp", "grpc"])
def test_a_byte_flipped_between_workers_is_noticed(wires: Deployment, name: str) -> None:
    worker = wires.services[name]
    before = worker.metric(CORRUPT)

    def noticed() -> bool:
        wires.check_right(QUESTION)
        return worker.metric(CORRUPT) > before

    with flipping(wires):
        until(noticed, "a wrong checksum was counted", 240)
    assert sum(proxy.num_flipped for proxy in kv_proxies(wires))


def test_a_byte_flipped_on_its_way_through_shared_memory_is_noticed(wires: Deployment) -> None:
    """What arrived is damaged before it is compared."""
    worker = wires.services["decode-2"]
    before = worker.metric(CORRUPT)
    paused = threading.Event()
    with wires.pausing("decode-2", "handoff.read") as pause, ThreadPoolExecutor(1) as pool:

        def ask_until_paused() -> None:
            while not paused.is_set():
                wires.check_right(QUESTION)

        asked = pool.submit(ask_until_paused)
        try:
            pause.reached()
        finally:
            paused.set()
        others = [wires.pid(name) for name in ("prefill-0/engine", "prefill-1/engine", "kvstore-0")]
        spoil_pool(wires.pid("decode-2/engine"), others)
        pause.release()
        asked.result(240)
    until(lambda: worker.metric(CORRUPT) == before + 1, "it was counted", 60)


def test_a_line_of_a_fixed_rate_costs_time_only(wires: Deployment) -> None:
    for proxy in kv_proxies(wires):
        proxy.bytes_per_s = SLOW_BYTES_PER_S
    try:
        for question in QUESTIONS:
            wires.check_right(question)
    finally:
        for proxy in kv_proxies(wires):
            proxy.bytes_per_s = math.inf


@contextlib.contextmanager
def apart(system: Deployment) -> Iterator[None]:
    """Nothing passes between prefill and decode workers; both still reach all others."""
    pids = frozenset(system.pid(name) for name in TRANSPORTS)
    controls = [system.proxies["prefill-0"][0], system.proxies["prefill-1"][0]]
    for proxy in controls:
        proxy.dropping_of = pids
    for proxy in kv_proxies(system):
        proxy.dropping = True
    try:
        yield
    finally:
        for proxy in controls:
            proxy.dropping_of = frozenset()
        for proxy in kv_proxies(system):
            proxy.dropping = False


@pytest.mark.parametrize("point", ["handoff.got_prefill_started", "handoff.got_commit"])
def test_a_partition_between_prefill_and_decode_changes_no_answer(
    wires: Deployment, point: str
) -> None:
    with wires.pausing("decode", point) as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(wires.ask, QUESTION))
        with apart(wires):
            pause.release()
            answer = asked.result(240)
            assert answer.is_right(wires.expected[QUESTION]), answer
            # and while it lasts
            wires.check_right(QUESTIONS[1])


def test_a_decode_worker_cut_off_from_its_router_is_replaced_or_missed_cleanly(
    wires: Deployment,
) -> None:
    with wires.pausing("decode", "handoff.got_commit") as pause, ThreadPoolExecutor(1) as pool:
        name, asked = pause.reached_by(lambda: pool.submit(wires.ask, QUESTION))
        (proxy,) = wires.proxies[name]
        proxy.dropping = True
        try:
            pause.release()
            answer = asked.result(240)
        finally:
            proxy.dropping = False
    expected = wires.expected[QUESTION]
    assert answer.is_right(expected) or answer.is_clean_error(expected), answer


def test_a_redis_that_answers_late_costs_no_request(wires: Deployment) -> None:
    (proxy,) = wires.proxies["redis"]
    proxy.delay_s = 0.4  # more than a heartbeat
    router = wires.services["router-0"]
    try:
        for _ in range(3):
            for question in QUESTIONS:
                wires.check_right(question)
        until(lambda: router.metric("diptych:workers_ready") == 5, "all workers are there")
    finally:
        proxy.delay_s = 0.0


# --- the ways that are left, in their order


def test_reads_that_keep_failing_go_through_the_store(wires: Deployment) -> None:
    """Another pair at first, then prefill and decode one after the other."""
    before = attempts(wires, "prefill")

    def stored() -> bool:
        wires.check_right(QUESTION)
        return attempts(wires, "prefill") > before

    with flipping(wires):
        until(stored, "an answer came through the store", 240)


def test_without_reads_and_store_another_worker_or_decode_computes(wires: Deployment) -> None:
    wires.send("kvstore-0", signal.SIGSTOP)
    try:
        with flipping(wires):
            for _ in range(3):
                wires.check_right(QUESTION)
    finally:
        wires.send("kvstore-0", signal.SIGCONT)


def test_a_prefill_worker_that_is_lost_is_replaced_by_the_other(wires: Deployment) -> None:
    before = {n: submitted(wires, n) for n in wires.of_role("prefill")}
    with wires.pausing("prefill", "engine.step") as pause, ThreadPoolExecutor(1) as pool:
        lost, asked = pause.reached_by(lambda: pool.submit(wires.ask, QUESTION))
        (other,) = before.keys() - {lost}
        with frozen(wires, lost):
            pause.release()
            answer = asked.result(240)
        assert answer.is_right(wires.expected[QUESTION]), answer
        assert submitted(wires, other) > before[other]


def test_without_prefill_workers_decode_computes_by_itself(wires: Deployment) -> None:
    before = attempts(wires, "whole")
    with wires.pausing("prefill", "engine.step") as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(wires.ask, QUESTION))
        with frozen(wires, "prefill-0", "prefill-1"):
            pause.release()
            answer = asked.result(240)
            assert answer.is_right(wires.expected[QUESTION]), answer
    assert attempts(wires, "whole") > before


@contextlib.contextmanager
def frozen(system: Deployment, *names: str) -> Iterator[None]:
    """These workers and their engines stand still."""
    for name in names:
        system.services[name].signal_all(signal.SIGSTOP)
    try:
        yield
    finally:
        for name in names:
            system.services[name].signal_all(signal.SIGCONT)
