"""Either side of a direct hand-off is killed or frozen at each of its phases, or its client leaves:
the answer is that of a clean run, and no block is left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.cluster import Api, Asking, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [(7 * i * i + i) % 200 + 3 for i in range(200)]
FIELDS = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}

# (who pauses there, the point): in the order in which a hand-off gets there
PHASES = [
    ("prefill", "worker.admitted"),
    ("decode", "worker.admitted"),
    ("prefill", "engine.step"),
    ("decode", "handoff.got_prefill_started"),
    ("decode", "handoff.got_chunk"),
    ("prefill", "handoff.send_commit"),
    ("decode", "handoff.got_commit"),
    ("prefill", "handoff.got_read_done"),
    ("decode", "handoff.got_valid"),
    ("decode", "engine.step"),
]
IDS = [f"{role} at {point}" for role, point in PHASES]


@dataclass
class Pools:
    """Two prefill and two decode workers, no store."""

    api: Api
    router: ServiceProcess
    workers: list[ServiceProcess]
    stopped: list[ServiceProcess] = field(default_factory=list)

    def of(self, role: str) -> list[ServiceProcess]:
        return [worker for worker in self.workers if worker.command == role]

    def complete(self) -> str:
        return str(self.api.complete(PROMPT, **FIELDS)["choices"][0]["text"])

    def pause_at(self, role: str, point: str) -> ServiceProcess:
        """Wait until a worker pauses there; the other goes by."""
        until(lambda: any(w.is_at(point) for w in self.of(role)), f"a {role} worker is at {point}")
        chosen = next(w for w in self.of(role) if w.is_at(point))
        for other in self.of(role):
            if other is not chosen:
                other.go_on()
        return chosen

    def whole(self) -> None:
        """All four run and are known, and nobody holds a block."""
        for worker in self.workers:
            assert worker.process is not None
            if worker.process.poll() is not None:
                worker.start()
        for worker in self.workers:
            worker.wait_ready()
        until(lambda: self.router.metric("diptych:workers_ready") == 4, "all are connected")
        for worker in self.workers:
            until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks")
            assert worker.metric("vllm:num_requests_running") == 0


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with running_pools(tmp_path_factory.mktemp("faults"), kv_lease_s=2.0) as made:
        yield made


@contextmanager
def running_pools(directory: Path, *, kv_lease_s: float) -> Iterator[Pools]:
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        made.silence_s = 5.0  # of those that these tests freeze
        workers, addresses = [], []
        for role in ("prefill", "prefill", "decode", "decode"):
            worker, address = made.worker(
                role,
                worker={"handoff": "direct", "kv_lease_s": kv_lease_s, "stream_grace_s": 2.0},
                max_num_batched_tokens=64,
                # what an engine remembers would hide the hand-off
                enable_prefix_caching=False,
            )
            workers.append(worker)
            addresses.append(address)
        router, api = made.router(*addresses, handoff="direct")
        made.wait_ready()
        yield Pools(api, router, workers)


@pytest.fixture(scope="module")
def expected(pools: Pools) -> str:
    pools.whole()
    return pools.complete()


def arm(pools: Pools, role: str, point: str) -> None:
    for worker in pools.of(role):
        worker.arm(point)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize(("role", "point"), PHASES, ids=IDS)
def test_a_worker_killed_at_any_phase_costs_time_only(
    pools: Pools, expected: str, role: str, point: str, victim: str
) -> None:
    pools.whole()
    arm(pools, role, point)
    asking = Asking(pools.api, PROMPT, **FIELDS)
    at = pools.pause_at(role, point)
    if victim == role:
        at.kill()
    else:
        # the other side of this hand-off, or its twin that has nothing to do with it
        busy = [w for w in pools.of(victim) if w.metric("vllm:num_requests_running")]
        (busy or pools.of(victim))[0].kill()
    for worker in pools.workers:
        worker.go_on()
    assert asking.text(300) == expected
    pools.whole()


@pytest.mark.parametrize(("role", "point"), PHASES, ids=IDS)
def test_a_client_that_leaves_at_any_phase_leaves_nothing_behind(
    pools: Pools, expected: str, role: str, point: str
) -> None:
    pools.whole()
    arm(pools, role, point)
    with pools.api.streaming(PROMPT, **FIELDS):
        pools.pause_at(role, point)
    for worker in pools.workers:
        worker.go_on()
    pools.whole()
    assert pools.complete() == expected


@pytest.mark.parametrize(
    ("role", "point"),
    [
        ("prefill", "engine.step"),
        ("prefill", "handoff.send_commit"),
        ("decode", "handoff.got_chunk"),
        ("decode", "handoff.got_commit"),
    ],
)
def test_a_worker_frozen_in_a_hand_off_is_not_waited_for(
    pools: Pools, expected: str, role: str, point: str
) -> None:
    pools.whole()
    arm(pools, role, point)
    asking = Asking(pools.api, PROMPT, **FIELDS)
    at = pools.pause_at(role, point)
    at.signal_all(signal.SIGSTOP)
    for worker in pools.workers:
        worker.go_on()
    try:
        assert asking.text(300) == expected
    finally:
        at.signal_all(signal.SIGCONT)
    # once it wakes it must not compute for nobody
    pools.whole()


def test_a_draining_prefill_waits_until_its_kv_was_read(tmp_path: Path) -> None:
    # with a lease that does not end while this process looks
    with running_pools(tmp_path, kv_lease_s=300.0) as pools:
        pools.whole()
        expected = pools.complete()
        drain_while_read(pools, expected)


def drain_while_read(pools: Pools, expected: str) -> None:
    pools.whole()
    failed = pools.router.metric("diptych:attempts_failed_total")
    arm(pools, "decode", "handoff.got_commit")
    asking = Asking(pools.api, PROMPT, **FIELDS)
    reader = pools.pause_at("decode", "handoff.got_commit")
    source = next(w for w in pools.of("prefill") if not w.all_blocks_free)
    assert source.process is not None
    source.process.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        source.process.wait(1)
    reader.go_on()
    assert asking.text(300) == expected
    assert source.process.wait(150) == 0
    assert "drained; 0 requests left" in source.log.read_text()
    assert pools.router.metric("diptych:attempts_failed_total") == failed
    pools.whole()
