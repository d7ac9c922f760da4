"""The beginning of a stored prefix is computed while its end is loaded, from a real node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from diptych.connectors.base import TransferRates
from diptych.connectors.direct_scheduler import DirectScheduler
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_worker import DirectWorker
from diptych.connectors.page_costs import LoadCosts
from diptych.connectors.page_orders import PageMetadata
from diptych.connectors.store import Client, ServiceStore
from diptych.connectors.store_scheduler import StoreScheduler
from diptych.engine.core import EngineCore
from diptych.engine.request import HandoffPeer, KVCommit, KVTransferParams
from diptych.errors import TransferError
from tests.connectors.fakes import NAMESPACE, Request, make_cache, make_layout
from tests.connectors.store_engines import (
    PROMPT,
    CutInTheMiddle,
    MakeCore,
    num_stored,
    run,
    take,
    until,
)
from tests.engine.make_requests import make_request
from tests.services.test_kvstore import Node

CUT, FOUND = 128, 192  # of the three pages the last is loaded


class GatedStore(ServiceStore):
    """Reads nothing until it may; then it may hurt the bytes, or fail."""

    def __init__(self, client: Client, how: str = "") -> None:
        super().__init__(client)
        self.how = how
        self.may_read = threading.Event()
        self.began = threading.Event()

    def get_many(
        self, items: Sequence[tuple[bytes, int]], sink: Callable[[int, memoryview], object]
    ) -> list[int | None]:
        self.began.set()
        assert self.may_read.wait(60)
        if self.how == "fails":
            raise TransferError("gone")

        def hurt(index: int, view: memoryview) -> object:
            if self.how == "is corrupt":
                flip(self.pools()[0], view)
            return sink(index, view)

        return super().get_many(items, hurt)


def flip(pool: memoryview, view: memoryview) -> None:
    """Flip a bit of the object in the node's own memory."""
    whole = np.frombuffer(pool, np.uint8)
    at = np.frombuffer(view, np.uint8).ctypes.data - whole.ctypes.data
    assert 0 <= at < whole.size
    whole[at + view.nbytes // 2] ^= 1


class Gate:
    """Makes the stores of one engine."""

    def __init__(self, how: str = "") -> None:
        self._how = how
        self.stores: list[GatedStore] = []

    def __call__(self, client: Client) -> GatedStore:
        self.stores.append(GatedStore(client, self._how))
        return self.stores[-1]

    def wait_until_reading(self) -> None:
        until(lambda: any(store.began.is_set() for store in self.stores))

    def open(self) -> None:
        for store in self.stores:
            store.may_read.set()


@pytest.fixture
def cold(node: Node, make_core: MakeCore) -> list[int]:
    """The answer of an engine that computes everything, whose pages the node has then."""
    answer = run(make_core(node), make_request("a", PROMPT))["a"]
    until(lambda: num_stored(node) == 3)
    return answer


def cut_core(
    make_core: MakeCore, node: Node, gate: Gate, max_num_batched_tokens: int
) -> tuple[EngineCore, dict[str, list[int]]]:
    """An engine that was just asked, whose loads go through the gate; and the answers to come."""
    core = make_core(
        node, costs=CutInTheMiddle, store=gate, max_num_batched_tokens=max_num_batched_tokens
    )
    core.add_request(make_request("a", PROMPT))
    return core, {}


def step_until(core: EngineCore, answers: dict[str, list[int]], reached: int) -> None:
    """Steps until request a has computed so many tokens, and a few more."""
    request = core._scheduler._requests["a"]
    deadline = time.monotonic() + 60
    while request.num_computed_tokens < reached:
        assert time.monotonic() < deadline
        take(core, answers)
    for _ in range(5):
        take(core, answers)
    assert request.num_computed_tokens >= reached


def check_cache(core: EngineCore, cold: list[int]) -> None:
    """All blocks are back, and what they are called is what they hold."""
    assert core.stats.num_free_kv_blocks == core.stats.num_kv_blocks
    assert run(core, make_request("again", PROMPT))["again"] == cold
    assert core.stats.prompt_tokens_local_cache_hit >= FOUND


def test_the_last_page_is_loaded_and_the_others_are_computed(
    node: Node, make_core: MakeCore, cold: list[int]
) -> None:
    core = make_core(node, costs=CutInTheMiddle)
    assert run(core, make_request("a", PROMPT))["a"] == cold
    assert core.stats.prompt_tokens_external_kv_transfer == FOUND - CUT
    assert core.stats.prompt_tokens_local_compute == len(PROMPT) - (FOUND - CUT)
    check_cache(core, cold)


@pytest.mark.parametrize("how", ["", "is corrupt", "fails"])
def test_a_load_that_ends_late_is_waited_for_and_one_that_fails_costs_no_second_start(
    node: Node, make_core: MakeCore, cold: list[int], how: str
) -> None:
    gate = Gate(how)
    core, answers = cut_core(make_core, node, gate, 48)
    step_until(core, answers, CUT)
    gate.wait_until_reading()
    assert core._scheduler._requests["a"].num_computed_tokens == CUT
    assert answers == {}
    gate.open()
    while core.has_work:
        take(core, answers)
    assert answers["a"] == cold
    loaded = 0 if how else FOUND - CUT
    assert core.stats.prompt_tokens_external_kv_transfer == loaded
    assert core.stats.prompt_tokens_local_compute == len(PROMPT) - loaded
    assert core.stats.num_kv_load_failures == bool(how)
    check_cache(core, cold)


@pytest.mark.parametrize("how", ["", "is corrupt", "fails"])
def test_a_load_that_ends_early_waits_for_what_is_before_it(
    node: Node, make_core: MakeCore, cold: list[int], how: str
) -> None:
    gate = Gate(how)
    core, answers = cut_core(make_core, node, gate, 16)
    until(lambda: take(core, answers) or core.stats.num_running > 0)
    gate.wait_until_reading()
    gate.open()
    worker = core._executor._connector  # type: ignore[attr-defined]
    until(lambda: not worker._transfers._live_loads)
    assert core._scheduler._requests["a"].num_computed_tokens < CUT
    while core.has_work:
        take(core, answers)
    assert answers["a"] == cold
    loaded = 0 if how else FOUND - CUT
    assert core.stats.prompt_tokens_local_compute == len(PROMPT) - loaded
    check_cache(core, cold)


def test_an_aborted_one_gives_its_blocks_back_when_no_byte_can_arrive(
    node: Node, make_core: MakeCore, cold: list[int]
) -> None:
    gate = Gate()
    core, answers = cut_core(make_core, node, gate, 48)
    step_until(core, answers, 48)
    gate.wait_until_reading()
    core.abort(["a"])
    for _ in range(5):
        take(core, answers)
    assert core.stats.num_free_kv_blocks < core.stats.num_kv_blocks
    gate.open()
    while core.has_work:
        take(core, answers)
    assert core.stats.num_free_kv_blocks == core.stats.num_kv_blocks
    assert run(core, make_request("b", PROMPT))["b"] == cold


def test_preempted_requests_answer_the_same(node: Node, make_core: MakeCore) -> None:
    requests = [
        make_request(name, [start, *PROMPT], max_tokens=60) for start, name in enumerate("abc", 1)
    ]
    whole = run(make_core(None, num_blocks=200), *requests)
    run(make_core(node), *requests)
    until(lambda: num_stored(node) == 9)
    crowded = make_core(node, num_blocks=42, costs=CutInTheMiddle, max_num_batched_tokens=64)
    assert run(crowded, *requests) == whole
    assert crowded.stats.num_preemptions > 0
    assert crowded.stats.prompt_tokens_external_kv_transfer > 0
    assert crowded.stats.num_free_kv_blocks == 42


def test_a_hand_off_of_what_was_partly_loaded_names_all_of_the_prompt(
    node: Node, make_core: MakeCore, cold: list[int]
) -> None:
    prefill, decode = make_core(node, costs=CutInTheMiddle), make_core(node)
    prefill.add_request(make_request("a", PROMPT, transfer=KVTransferParams(do_remote_decode=True)))
    commits: list[KVCommit] = []
    first: list[int] = []
    deadline = time.monotonic() + 60
    while prefill.has_work:
        assert time.monotonic() < deadline
        outputs = prefill.step()
        if outputs is not None:
            first += outputs.token_ids
            commits += outputs.commits.values()
    assert prefill.stats.prompt_tokens_external_kv_transfer == FOUND - CUT
    assert (commits[0].num_tokens, commits[0].num_cached_tokens) == (200, FOUND - CUT)
    params = KVTransferParams(commit=commits[0])
    rest = run(decode, make_request("a", PROMPT, output=first, transfer=params))
    assert decode.stats.prompt_tokens_external_kv_transfer == 200
    assert [*first, *rest["a"]] == cold


# --- what the connector orders


class Found:
    """A look-up that has its answer."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages

    def start(self, request_id: str, keys: list[bytes]) -> None: ...
    def pending(self, request_id: str) -> bool:
        return False

    def found(self, request_id: str) -> int:
        return self._num_pages

    def forget(self, request_id: str) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("load_tokens_per_s", "pending", "beside"),
    [(1000, 0, 512), (3000, 0, 256), (300, 0, 832), (100_000, 0, 0), (1000, 5000, 0)],
)
def test_what_is_loaded_is_what_is_not_computed_meanwhile(
    load_tokens_per_s: int, pending: int, beside: int
) -> None:
    layout = make_layout(16)
    costs = LoadCosts(1, lambda: 0.0)
    costs.note(TransferRates(load_tokens_per_s, 1.0, computed_tokens=1000, compute_s=1.0))
    scheduler = StoreScheduler(layout, Found(16), costs)  # type: ignore[arg-type]
    request = Request("r", list(range(1100)))
    assert scheduler.get_num_new_matched_tokens(request, 0, pending) == (1024, True)
    assert scheduler.num_computed_beside(request) == beside
    scheduler.update_state_after_alloc(request, list(range(80)), 1024 - beside)
    [order] = scheduler.build_connector_meta({}).loads
    assert (order.start_token, order.end_token) == (beside, 1024)
    assert [o.start_token for o in order.objects] == list(range(beside, 1024, 64))


def test_a_store_that_is_much_too_slow_is_left_alone() -> None:
    costs = LoadCosts(1, lambda: 0.0)
    costs.note(TransferRates(10, 1.0, computed_tokens=1000, compute_s=1.0))
    scheduler = StoreScheduler(make_layout(16), Found(16), costs)  # type: ignore[arg-type]
    assert scheduler.get_num_new_matched_tokens(Request("r", list(range(1100))), 0) == (0, False)


def test_one_that_a_peer_reads_and_that_is_aborted_is_read_no_more() -> None:
    """It computes beside its load, so that chunks of it have been announced already."""
    layout = make_layout(16)
    worker = DirectWorker(DirectSettings(transports="tcp"))
    worker.register_kv_caches(make_cache(layout), layout)
    try:
        assert worker.driver is not None
        costs = CutInTheMiddle(1, lambda: 0.0)
        store = StoreScheduler(layout, Found(3), costs)  # type: ignore[arg-type]
        scheduler = DirectScheduler(worker.driver, NAMESPACE, store)
        peer = HandoffPeer(worker_id="d", incarnation="decode-1")
        params = KVTransferParams(epoch=1, do_remote_decode=True, peer=peer)
        request = Request("r", PROMPT, kv_transfer_params=params)
        assert scheduler.get_num_new_matched_tokens(request, 0, 0) == (FOUND, True)
        assert scheduler.num_computed_beside(request) == CUT
        scheduler.update_state_after_alloc(request, list(range(13)), FOUND - CUT)
        scheduler.build_connector_meta({"r": (request, list(range(13)), CUT)})
        assert scheduler.is_read("r")
        scheduler.abort("r")
        assert not scheduler.is_read("r")
        metadata = scheduler.build_connector_meta({}).other
        assert isinstance(metadata, PageMetadata)
        assert metadata.aborts == ["r"]
    finally:
        worker.shutdown()
