"""The store and its users are killed, frozen and lied to: the answer stays the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [(7 * i * i + i) % 200 + 3 for i in range(200)]
FIELDS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
PAGES = 3


@dataclass
class System:
    """One prefill, one decode, one store with a disk."""

    api: Api
    router: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    store: ServiceProcess
    disk: Path

    def answer(self) -> str:
        """The text after the prompt."""
        return str(self.api.complete(PROMPT, **FIELDS)["choices"][0]["text"])

    def until_on_disk(self, count: int) -> None:
        until(lambda: self.store.metric("diptych:kvstore_disk_objects") >= count, "files are there")

    def restart(self, *services: ServiceProcess) -> None:
        for service in services:
            service.start()
        for service in services:
            service.wait_ready()
        until(lambda: self.router.metric("diptych:workers_ready") >= 2, "all are connected")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("store")
    disk = directory / "disk"
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        store, address = made.kvstore(ssd_path=str(disk), ssd_min_uses=1)
        # what the engines remember themselves would hide the store
        prefill, first = made.worker("prefill", store=address, enable_prefix_caching=False)
        decode, second = made.worker("decode", store=address, enable_prefix_caching=False)
        router, api = made.router(first, second)
        made.wait_ready()
        until(lambda: router.metric("diptych:workers_ready") >= 2, "all workers are connected")
        yield System(api, router, prefill, decode, store, disk)


@pytest.fixture(scope="module")
def expected(system: System) -> str:
    return system.answer()


def test_a_restarted_prefill_worker_finds_in_the_store_what_it_had_computed(
    system: System, expected: str
) -> None:
    system.prefill.kill()
    until(lambda: system.router.metric("diptych:workers_ready") < 2, "it is missed")
    system.restart(system.prefill)

    def is_found() -> bool:
        # a look-up that takes more than its 0.1 s finds nothing
        found = system.api.complete(PROMPT, **FIELDS)
        assert found["choices"][0]["text"] == expected
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached in (0, 64 * PAGES)
        return bool(cached)

    until(is_found, "prefill finds its pages")
    assert system.prefill.prompt_tokens("external_kv_transfer") == 64 * PAGES


def test_a_store_that_is_killed_costs_time_and_comes_back_with_its_disk(
    system: System, expected: str
) -> None:
    system.until_on_disk(PAGES)
    system.store.kill()
    assert system.answer() == expected
    system.restart(system.store)
    system.until_on_disk(PAGES)
    assert system.answer() == expected

    def handed_over() -> bool:
        before = system.decode.prompt_tokens("external_kv_transfer")
        assert system.answer() == expected
        return system.decode.prompt_tokens("external_kv_transfer") >= before + len(PROMPT)

    until(handed_over, "hand-offs go by the store again")


def test_a_frozen_store_delays_an_answer_and_changes_none(system: System, expected: str) -> None:
    assert system.store.process is not None
    system.store.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert system.answer() == expected
        assert time.monotonic() - began < 150
    finally:
        system.store.process.send_signal(signal.SIGCONT)
    assert system.answer() == expected


def test_damaged_files_are_computed_again(system: System, expected: str) -> None:
    system.until_on_disk(PAGES)
    for service in (system.store, system.prefill):
        service.kill()
    until(lambda: system.router.metric("diptych:workers_ready") < 2, "it is missed")
    for path in system.disk.glob("*/*"):
        raw = bytearray(path.read_bytes())
        raw[4096 + len(raw) // 8] ^= 1
        path.write_bytes(raw)
    system.restart(system.store, system.prefill)
    system.until_on_disk(PAGES)
    for _ in range(3):
        assert system.answer() == expected

    def all_seen() -> bool:
        assert system.answer() == expected
        return system.store.metric("diptych:kvstore_disk_corrupt_total") >= PAGES

    until(all_seen, "every damaged page was looked at")
