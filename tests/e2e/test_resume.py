"""Workers leave in the middle of an answer, or are killed: it goes on elsewhere, no token lost or
repeated, from KV that is stored where there is any, whatever way KV takes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.cluster import Api, Asking, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [(11 * i * i + 3 * i) % 200 + 3 for i in range(200)]
FIELDS = {"max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True}
MODES = ["direct", "store", "auto"]


@dataclass
class Pools:
    """Two prefill and two decode workers, with a store but for `direct`."""

    mode: str
    api: Api
    router: ServiceProcess
    workers: list[ServiceProcess]
    expected: str = ""

    def of(self, role: str) -> list[ServiceProcess]:
        return [worker for worker in self.workers if worker.command == role]

    def sum_of(self, role: str, source: str) -> float:
        """Prompt tokens of a pool by where their KV came from; those of dead workers are not in."""
        living = [w for w in self.of(role) if w.process is not None and w.process.poll() is None]
        return sum(worker.prompt_tokens(source) for worker in living)

    def whole(self) -> None:
        """All four run and are known, and nobody holds a block."""
        for worker in self.workers:
            if worker.process is None or worker.process.poll() is not None:
                worker.start()
        for worker in self.workers:
            worker.wait_ready()
        until(lambda: self.router.metric("diptych:workers_ready") == 4, "all are known", 60)
        if self.mode == "auto":
            until(self._linked, "all links are tested", 60)
        for worker in self.workers:
            until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks", 60)

    def _linked(self) -> bool:
        """The router asks for links once a second: a pair's attempt shows that it knows."""
        links = "diptych:handoff_link_bytes_per_second"
        before = self.router.metric("diptych:attempts_total", stage="pair")
        self.api.complete(PROMPT[:20], max_tokens=2)
        paired = self.router.metric("diptych:attempts_total", stage="pair") > before
        return paired and all(worker.metric(links) > 0 for worker in self.of("decode"))


@pytest.fixture(scope="module", params=MODES)
def pools(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pools]:
    mode = request.param
    directory = tmp_path_factory.mktemp(f"resume-{mode}")
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        place = None if mode == "direct" else made.kvstore()[1]
        settings = {"handoff": mode, "kv_lease_s": 2.0, "stream_grace_s": 2.0, "drain_s": 0.5}
        workers, addresses = [], []
        for role in ("prefill", "prefill", "decode", "decode"):
            worker, address = made.worker(
                role,
                store=place,
                worker=settings,
                # what an engine remembers would hide where KV came from
                enable_prefix_caching=False,
            )
            workers.append(worker)
            addresses.append(address)
        router, api = made.router(*addresses, handoff=mode)
        made.wait_ready()
        pools = Pools(mode, api, router, workers)
        pools.whole()
        pools.expected = api.complete(PROMPT, **FIELDS)["choices"][0]["text"]
        yield pools


def decoding(pools: Pools, asking: Asking) -> ServiceProcess:
    """The decode worker that pauses in the middle of the answer. Steps before it are let by."""
    for worker in pools.of("decode"):
        worker.arm("engine.step")
    until(lambda: any(w.is_at("engine.step") for w in pools.of("decode")), "one decodes", 60)
    chosen = next(w for w in pools.of("decode") if w.is_at("engine.step"))
    for other in pools.of("decode"):
        if other is not chosen:
            other.go_on()
    return chosen


def kill(worker: ServiceProcess) -> None:
    worker.signal_all(signal.SIGKILL)
    assert worker.process is not None
    worker.process.wait(30)


def drain(worker: ServiceProcess) -> None:
    """Its time to drain is over before the answer is."""
    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)
    until(lambda: "drained; 1 requests left" in worker.log.read_text(), "its time is over", 60)
    worker.go_on()
    worker.process.wait(60)


@pytest.mark.parametrize("leave", [kill, drain])
def test_an_answer_goes_on_when_its_decode_worker_leaves_in_the_middle(
    pools: Pools, leave: Callable[[ServiceProcess], None]
) -> None:
    pools.whole()
    asking = Asking(pools.api, PROMPT, **FIELDS)
    until(lambda: len(asking.pieces) > 3, "decode has begun", 60)
    chosen = decoding(pools, asking)
    (other,) = (w for w in pools.of("decode") if w is not chosen)
    computed, loaded = (
        pools.sum_of("prefill", "local_compute"),
        other.prompt_tokens("external_kv_transfer"),
    )
    from_store = pools.sum_of("prefill", "external_kv_transfer")
    num_before = len(asking.pieces)
    assert num_before < FIELDS["max_tokens"]

    leave(chosen)

    assert asking.text(120) == pools.expected
    # the other has the prompt's KV from elsewhere
    assert other.prompt_tokens("external_kv_transfer") - loaded >= len(PROMPT)
    again = pools.sum_of("prefill", "local_compute") - computed
    if pools.mode == "store":
        assert again == 0, "decode goes on from the same commit"
    if pools.mode == "auto":
        # what the store has is loaded where that is predicted to be cheaper
        again += pools.sum_of("prefill", "external_kv_transfer") - from_store
        assert again == len(PROMPT)


@pytest.mark.parametrize("point", ["engine.step", "worker.admitted"])
def test_a_prefill_worker_that_is_told_to_leave_finishes_and_waits_for_its_reader(
    pools: Pools, point: str
) -> None:
    pools.whole()
    failed = pools.router.metric("diptych:attempts_failed_total")
    for worker in pools.of("prefill"):
        worker.arm(point)
    asking = Asking(pools.api, PROMPT, **FIELDS)
    until(lambda: any(w.is_at(point) for w in pools.of("prefill")), "one has the prompt", 60)
    leaving = next(w for w in pools.of("prefill") if w.is_at(point))
    assert leaving.process is not None
    leaving.process.send_signal(signal.SIGTERM)
    for worker in pools.of("prefill"):
        worker.go_on()
    assert asking.text(120) == pools.expected
    assert leaving.process.wait(60) == 0
    assert pools.router.metric("diptych:attempts_failed_total") == failed
