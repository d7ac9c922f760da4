"""Loads of prompts that are still being stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from diptych.clock import SystemClock
from diptych.connectors.page_orders import LoadOrder, Outgoing, PageStore
from diptych.connectors.shared_storage import FileStore
from diptych.connectors.store import ServiceStore
from diptych.connectors.store_move import finish
from diptych.connectors.transfer_jobs import Load, TransferLimits
from diptych.connectors.transfers import Transfers
from diptych.engine.request import KVObject
from tests.connectors.engines import OUR_BLOCKS, PROMPT, Engine, running
from tests.connectors.fakes import consumer, follower, producer, same_kv, token_kv
from tests.services.test_kvstore import Node, patient, running_node

PATIENT = TransferLimits(transfer_timeout_s=600.0)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node


@pytest.fixture(params=["memory", "stream", "files"])
def open_store(
    request: pytest.FixtureRequest, node: Node, tmp_path: Path
) -> Callable[[], PageStore]:
    if request.param == "files":
        return lambda: FileStore(tmp_path)
    return lambda: ServiceStore(patient(node.address, transport=request.param))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_pages_are_loaded_while_the_rest_of_the_prompt_is_computed(
    open_store: Callable[[], PageStore], request: pytest.FixtureRequest
) -> None:
    prompt = [*request.node.name.encode(), *PROMPT]
    prefill, decode = Engine(open_store, seed=1), Engine(open_store, 64, limits=PATIENT)
    end = len(prompt) // 64 * 64
    theirs = (decode.cache, OUR_BLOCKS)
    with running(prefill, decode):
        asked = follower("r", prompt)
        assert decode.order_load(asked) == len(prompt)
        decode.step()
        sent = producer("r", prompt)
        for computed in (64, end, len(prompt)):
            assert decode.worker.get_finished().empty, "it waits for what is not there yet"
            prefill.step((sent, computed))
            sent.num_computed_tokens = computed
            until(lambda last=computed - 1: token_kv(*theirs, last).any())
        assert not decode.wait("finished_recving").failed_recving
        assert same_kv((prefill.cache, OUR_BLOCKS), theirs, 0, len(prompt))
        prefill.scheduler.request_finished(sent, OUR_BLOCKS)


def test_only_what_the_prefix_cache_lacks_is_awaited(tmp_path: Path) -> None:
    prefill = Engine(FileStore(tmp_path), seed=1)
    decode = Engine(FileStore(tmp_path), limits=PATIENT)
    with running(prefill, decode):
        assert decode.order_load(follower("r", PROMPT), 80) == 70
        decode.step()
        prefill.send(producer("r", PROMPT))
        assert not decode.wait("finished_recving").failed_recving
        assert same_kv((prefill.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 80, 150)
        assert not any(token_kv(decode.cache, OUR_BLOCKS, p).any() for p in range(80))


def test_an_awaited_load_that_is_aborted_is_reported_and_nothing_comes_after(
    tmp_path: Path,
) -> None:
    prefill = Engine(FileStore(tmp_path), seed=1)
    decode = Engine(FileStore(tmp_path), limits=PATIENT)
    with running(prefill, decode):
        decode.order_load(follower("r", PROMPT))
        decode.step()
        decode.scheduler.abort("r")
        decode.step()
        assert decode.wait("finished_recving").failed_recving == {"r": 0}
        prefill.send(producer("r", PROMPT))
        later = [5, *PROMPT[:63]]
        decode.load(consumer("s", later, prefill.send(producer("s", later))))
        assert not any(token_kv(decode.cache, OUR_BLOCKS, p).any() for p in range(64, 150))


def test_who_waits_holds_up_neither_other_loads_nor_saves(tmp_path: Path) -> None:
    prefill = Engine(FileStore(tmp_path), seed=1)
    decode = Engine(FileStore(tmp_path), seed=2, limits=PATIENT)
    others = [9, *PROMPT]
    with running(prefill, decode):
        for name in ("waits", "too"):
            decode.order_load(follower(name, [len(name), *PROMPT]))
        decode.step()
        commit = prefill.send(producer("r", others))
        assert not decode.load(consumer("r", others, commit)).failed_recving
        assert decode.send(producer("s", [6, *PROMPT])).num_tokens == len(others)
        for name in ("waits", "too"):
            decode.scheduler.abort(name)
        decode.step()
        decode.wait("finished_recving", "waits")


def test_shutdown_ends_a_load_that_waits(tmp_path: Path) -> None:
    decode = Engine(FileStore(tmp_path), limits=PATIENT)
    with running(decode):
        decode.order_load(follower("r", PROMPT))
        decode.step()
        until(lambda: decode.transfers._live_loads["r"].moved_s)
    assert decode.worker.get_finished().failed_recving == {"r": 0}


@dataclass
class ManualClock(SystemClock):
    """Time that a test moves."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Copier:
    token_bytes = 1

    def reach(self, pools: Sequence[memoryview]) -> None:
        return

    def scatter(self, *args: object) -> None:
        return


@dataclass
class SomePages:
    """A store that has some objects, with what is asked for."""

    there: set[bytes]
    asked: list[list[bytes]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    is_lost: bool = False
    turn: threading.Event = field(default_factory=threading.Event)

    def put_many(self, items: Sequence[Outgoing], tenant: str) -> list[int | None]:
        raise AssertionError

    def get_many(
        self,
        items: Sequence[tuple[bytes, int]],
        sink: Callable[[int, memoryview], object],
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = lambda: False,
    ) -> list[int | None]:
        self.asked.append([key for key, _ in items])
        self.waits_s.append(wait_s)
        self.turn.set()
        if self.is_lost:
            raise ConnectionError
        time.sleep(0.001)
        for index, (key, num_bytes) in enumerate(items):
            if key in self.there:
                finish(sink(index, memoryview(bytes(num_bytes))))
        return [1 if key in self.there else None for key, _ in items]

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        return


def awaited_load(deadline_s: float) -> Load:
    pages = [
        KVObject(
            key=bytes([i]) * 32, start_token=i * 64, end_token=i * 64 + 64, checksum=0, num_bytes=64
        )
        for i in range(4)
    ]
    return Load(LoadOrder("r", 10, 256, pages, [], False, follows=True), deadline_s, 10)


@pytest.mark.parametrize(
    ("there", "valid"), [([], 10), ([0], 64), ([0, 1], 128), ([1, 3], 10), ([0, 3], 64)]
)
def test_what_does_not_come_for_long_is_left_to_compute(there: list[int], valid: int) -> None:
    clock, store = ManualClock(), SomePages({bytes([i]) * 32 for i in there})
    moving = Transfers("test", lambda: store, Copier(), PATIENT, clock)  # type: ignore[arg-type]
    moving.load(awaited_load(1e9))
    until(lambda: len(store.asked) > 3)
    assert len(store.asked[-1]) == 4 - len(there), "what has come is not asked for again"
    assert moving.take_output().empty
    clock.now += PATIENT.transfer_timeout_s / 2 + 1
    until(lambda: not moving._live_loads)
    assert moving.take_output().failed_recving == {"r": valid}
    moving.close()


def test_of_many_that_wait_each_has_a_shorter_turn() -> None:
    """One whose prefill stands still keeps those of others from what is there for them."""
    store = SomePages(set())
    moving = Transfers("test", lambda: store, Copier(), PATIENT, ManualClock())  # type: ignore[arg-type]
    moving.load(awaited_load(1e9))
    until(lambda: len(store.asked) > 2)
    alone_s = store.waits_s[1]
    other = awaited_load(1e9)
    other.order = replace(other.order, request_id="other")
    moving.load(other)
    until(lambda: store.waits_s[-1] < alone_s / 2)
    moving.close()


class HastyStore(SomePages):
    """Says that it has read before the copies have ended."""

    def get_many(self, items: Any, sink: Any, *more: Any) -> list[int | None]:
        for index, (_, num_bytes) in enumerate(items):
            sink(index, memoryview(bytes(num_bytes)))
        return [1] * len(items)


@pytest.mark.parametrize("follows", [True, False])
def test_a_store_that_does_not_end_its_copies_brings_nothing(follows: bool) -> None:
    """Its word that it has read is not enough."""
    store = HastyStore(set())
    moving = Transfers("test", lambda: store, Copier(), PATIENT, ManualClock())  # type: ignore[arg-type]
    load = awaited_load(1e9)
    load.order = replace(load.order, follows=follows)
    moving.load(load)
    until(lambda: not moving._live_loads)
    assert moving.take_output().failed_recving == {"r": 10}
    moving.close()


def test_a_store_that_is_lost_meanwhile_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    store = SomePages({b"\0" * 32})
    moving = Transfers("test", lambda: store, Copier(), PATIENT, ManualClock())  # type: ignore[arg-type]
    moving.load(awaited_load(1e9))
    until(lambda: len(store.asked) > 2)
    store.is_lost = True
    until(lambda: not moving._live_loads)
    assert moving.take_output().failed_recving == {"r": 64}
    moving.close()


def test_a_load_is_expected_while_its_last_quarter_comes_and_then_taken_by_itself() -> None:
    clock, store = ManualClock(), SomePages({bytes([i]) * 32 for i in range(2)})
    moving = Transfers("test", lambda: store, Copier(), PATIENT, clock)  # type: ignore[arg-type]
    moving.load(awaited_load(1e9))
    until(lambda: len(store.asked) > 2)
    assert not moving.is_arriving
    store.there.add(b"\2" * 32)
    until(lambda: moving.is_arriving)
    moving.await_arrival(clock.now, first=False)  # too late already
    clock.now += 1
    assert not moving.is_arriving, "it is stuck"
    moving.await_arrival(1e9, first=False)
    assert moving.take_arrived() is None
    store.there.add(b"\3" * 32)
    until(lambda: not moving._live_loads)
    arrived = moving.take_arrived()
    assert arrived is not None
    assert arrived.finished_recving == {"r"}
    assert moving.take_arrived() is None
    assert moving.take_output().empty
    moving.close()


def test_a_step_is_held_for_a_load_of_which_all_is_on_its_way() -> None:
    clock, store = ManualClock(), SomePages({bytes([i]) * 32 for i in range(4)})
    moving = Transfers("test", lambda: store, Copier(), PATIENT, clock)  # type: ignore[arg-type]
    moving._times.last_pace.note(1, 0.004)
    load = awaited_load(1e9)
    moving._live_loads["r"] = load
    assert moving.hold_until_s(1e9) == 0.0
    load.num_taken, load.read_s = 4, clock.now
    assert moving.hold_until_s(clock.now + 0.005) == pytest.approx(clock.now + 0.006)
    assert moving.hold_until_s(clock.now + 0.003) == 0.0, "it comes too late"
    clock.now += 0.007
    assert moving.hold_until_s(clock.now + 1) == 0.0, "it was to be there by now"
    clock.now -= 0.007
    moving._come.add("s")
    assert moving.hold_until_s(clock.now + 1) == 0.0, "another one waits for no third"
    moving._live_loads.clear()
    moving.close()


def test_what_did_not_come_whole_is_not_taken_as_arrived() -> None:
    clock, store = ManualClock(), SomePages(set())
    moving = Transfers("test", lambda: store, Copier(), PATIENT, clock)  # type: ignore[arg-type]
    moving.load(awaited_load(1e9))
    until(lambda: store.asked)
    clock.now += PATIENT.transfer_timeout_s
    until(lambda: not moving._live_loads)
    assert moving.take_arrived() is None
    assert moving.take_output().finished_recving == {"r"}
    moving.close()
