"""`handoff: auto`: from worker to worker where the link passed its test, else through the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.answers import prompt
from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIELDS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass
class System:
    """One prefill worker; a decode worker that can read from it, and one that cannot, each behind a
    router of its own; a store."""

    store: ServiceProcess
    prefill: ServiceProcess
    linked: ServiceProcess
    unlinked: ServiceProcess
    router: ServiceProcess
    direct: Api
    other_router: ServiceProcess
    stored: Api

    def pairs(self, router: ServiceProcess) -> float:
        return router.metric("diptych:attempts_total", stage="pair")

    def until_paired(self) -> None:
        """The link to the prefill worker that runs now was tested."""
        before = self.pairs(self.router)

        def went_directly() -> bool:
            self.text(self.direct, salt=1)
            return self.pairs(self.router) > before

        until(went_directly, "the pair is used")

    def text(self, api: Api, salt: int, num_tokens: int = 150) -> str:
        ids = prompt(num_tokens, salt)
        return str(api.complete(ids, **FIELDS)["choices"][0]["text"])


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("auto")
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        store, place = made.kvstore()
        auto = {"handoff": "auto", "kv_lease_s": 10.0}
        # what engines remember would hide the way by which KV came
        engine = {"enable_prefix_caching": False}
        prefill, p = made.worker(
            "prefill", store=place, worker={**auto, "kv_transports": "shm"}, **engine
        )
        linked, d1 = made.worker(
            "decode", store=place, worker={**auto, "kv_transports": "shm"}, **engine
        )
        unlinked, d2 = made.worker(
            "decode", store=place, worker={**auto, "kv_transports": "tcp"}, **engine
        )
        router, direct = made.router(p, d1, handoff="auto")
        other_router, stored = made.router(p, d2, handoff="auto")
        made.wait_ready()
        yield System(store, prefill, linked, unlinked, router, direct, other_router, stored)


def test_a_link_that_passed_its_test_is_used_ahead_of_any_request(system: System) -> None:
    system.until_paired()
    received = system.linked.prompt_tokens("external_kv_transfer")
    system.text(system.direct, salt=2)
    until(
        lambda: system.linked.prompt_tokens("external_kv_transfer") - received == 150,
        "decode reads the whole prompt",
    )
    assert system.router.metric("diptych:attempts_failed_total") == 0


def test_without_a_common_transport_the_store_carries_it(system: System) -> None:
    received = system.unlinked.prompt_tokens("external_kv_transfer")
    assert system.text(system.stored, salt=3) == system.text(system.direct, salt=3)
    assert system.pairs(system.other_router) == 0
    until(
        lambda: system.unlinked.prompt_tokens("external_kv_transfer") - received == 150,
        "decode loads the whole prompt",
    )
    assert system.unlinked.prompt_tokens("local_compute") == 0


def test_a_restarted_prefill_finds_in_the_store_what_readers_had_of_it(system: System) -> None:
    ids = prompt(200, salt=4)
    first = system.direct.complete(ids, **FIELDS)
    system.prefill.kill()
    until(lambda: system.router.metric("diptych:workers_ready") == 1, "it is missed")
    system.prefill.start()
    system.prefill.wait_ready()
    until(lambda: system.router.metric("diptych:workers_ready") == 2, "it is back")

    def is_found() -> bool:
        # a look-up that takes more than its 0.1 s finds nothing
        again = system.direct.complete(ids, **FIELDS)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached in (0, 192)
        return bool(cached)

    until(is_found, "prefill finds its pages")
    assert system.prefill.prompt_tokens("external_kv_transfer") == 192
    system.until_paired()


@pytest.mark.parametrize(
    ("point", "salt", "failures"),
    [("handoff.read", 6, 1), ("handoff.got_prefill_started", 7, 0)],
)
def test_a_reader_that_is_too_late_finds_it_in_the_store(
    system: System, point: str, salt: int, failures: int
) -> None:
    """One that has read it, as the lease of what it read has ended, in another attempt; one that
    never said that it has room, in the same. Both find all of it, and compute nothing."""
    expected = system.text(system.direct, salt=salt)

    def too_late() -> float:
        """Tokens that decode computed of one whose reader paused."""
        failed = system.router.metric("diptych:attempts_failed_total", stage="pair")
        computed = system.linked.prompt_tokens("local_compute")
        system.linked.arm(point)
        texts: list[str] = []

        def ask() -> None:
            texts.append(system.text(system.direct, salt=salt))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: system.linked.is_at(point), "decode pauses")
        until(lambda: system.prefill.all_blocks_free, "prefill holds it no longer")
        system.linked.go_on()
        asking.join(300)
        assert texts == [expected]
        lost = system.router.metric("diptych:attempts_failed_total", stage="pair") - failed
        assert lost == failures
        return system.linked.prompt_tokens("local_compute") - computed

    def is_found() -> bool:
        # a look-up that takes more than its 0.1 s finds nothing, and a tail that is long on its
        # way is not waited for
        count = too_late()
        assert count in (0, 22, 150)
        return count == 0

    until(is_found, "decode finds it", 300)
    for worker in (system.prefill, system.linked, system.unlinked):
        until(lambda w=worker: w.all_blocks_free, "blocks come back")


def test_a_prefill_worker_that_dies_as_it_leaves_its_kv_to_the_store_costs_time_only(
    system: System,
) -> None:
    system.until_paired()
    expected = system.text(system.direct, salt=8)
    system.linked.arm("handoff.got_prefill_started")
    system.prefill.arm("handoff.send_stored")
    texts: list[str] = []
    asking = threading.Thread(target=lambda: texts.append(system.text(system.direct, salt=8)))
    asking.start()
    until(lambda: system.linked.is_at("handoff.got_prefill_started"), "decode pauses")
    until(lambda: system.prefill.is_at("handoff.send_stored"), "prefill gives up holding it")
    system.prefill.kill()
    system.linked.go_on()
    asking.join(300)
    assert texts == [expected]
    system.prefill.start()
    system.prefill.wait_ready()
    system.until_paired()
    for worker in (system.prefill, system.linked):
        until(lambda w=worker: w.all_blocks_free, "blocks come back")


def test_a_dead_store_is_not_missed_by_a_pair(system: System) -> None:
    expected = system.text(system.direct, salt=5)
    system.store.kill()
    failed = system.router.metric("diptych:attempts_failed_total", stage="pair")
    pairs = system.pairs(system.router)
    assert system.text(system.direct, salt=5) == expected
    assert system.pairs(system.router) == pairs + 1
    assert system.router.metric("diptych:attempts_failed_total", stage="pair") == failed
