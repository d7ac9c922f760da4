"""The store as a tier of the prefix cache: looked up aside, loaded if cheaper, written behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence

import pytest

from diptych.connectors.base import TransferRates
from diptych.connectors.page_costs import LoadCosts
from diptych.connectors.page_lookup import PrefixLookup
from diptych.connectors.page_split import Prefix
from diptych.connectors.store_scheduler import StoreScheduler
from diptych.engine.request import KVCommit, KVTransferParams
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb
from tests.connectors.fakes import Request, make_layout
from tests.connectors.store_engines import (
    PROMPT,
    MakeCore,
    num_stored,
    run,
    until,
)
from tests.engine.make_requests import make_request
from tests.services.test_kvstore import Node, control

# --- the question


class Answers:
    """A store that answers when it may."""

    def __init__(self, present: set[bytes], error: Exception | None = None) -> None:
        self.may_answer = threading.Event()
        self.present = present
        self.error = error
        self.calls = 0

    def exists_many(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        if keys == [bytes(32)]:
            return [False]  # only whether somebody is there
        self.calls += 1
        self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        return [key in self.present for key in keys]

    def close(self) -> None:
        return


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def test_what_is_found_ends_before_the_first_key_that_is_missing() -> None:
    store = Answers(set(keys(1, 2, 4)))
    lookup = PrefixLookup(lambda: store, time.monotonic, timeout_s=60.0)
    lookup.start("a", keys(1, 2, 3, 4))
    assert lookup.pending("a")
    assert lookup.found("a") == 0
    store.may_answer.set()
    lookup.start("b", keys(9))
    lookup.start("c", [])
    until(lambda: not (lookup.pending("a") or lookup.pending("b")))
    assert [lookup.found(name) for name in "abcd"] == [2, 0, 0, 0]
    assert not lookup.pending("c")
    lookup.close()


def test_those_that_wait_are_asked_for_in_one_call() -> None:
    store = Answers(set(keys(1)))
    lookup = PrefixLookup(lambda: store, time.monotonic, timeout_s=60.0)
    lookup.start("first", keys(1))
    until(lambda: store.calls == 1)
    for number in range(20):
        lookup.start(str(number), keys(1))
    store.may_answer.set()
    until(lambda: not any(lookup.pending(str(number)) for number in range(20)))
    assert store.calls == 2
    assert lookup.found("19") == 1
    lookup.close()


def test_what_is_not_answered_in_time_is_nothing_found() -> None:
    store = Answers(set(keys(1)))
    lookup = PrefixLookup(lambda: store, time.monotonic, timeout_s=0.05)
    lookup.start("a", keys(1))
    until(lambda: not lookup.pending("a"))
    assert lookup.found("a") == 0
    store.may_answer.set()
    lookup.close()


def test_a_store_that_fails_has_nothing() -> None:
    store = Answers(set(), TransferError("gone"))
    store.may_answer.set()
    lookup = PrefixLookup(lambda: store, time.monotonic, timeout_s=60.0)
    lookup.start("a", keys(1))
    until(lambda: not lookup.pending("a"))
    assert lookup.found("a") == 0
    lookup.close()


# --- the choice


def test_the_cheaper_way_is_taken_at_measured_rates() -> None:
    now = [0.0]
    costs = LoadCosts(1000, lambda: now[0])

    def loads(num_queued: int = 0) -> bool:
        return costs.cut(Prefix(0, 500), (), num_queued) == 0

    assert loads()  # nothing is known: a load measures itself
    costs.note(TransferRates(loaded_bytes=1_000_000, load_s=1.0, computed_tokens=100, compute_s=1))
    assert loads()
    # 0.504 s to load and 5 s to compute; behind a long queue computing is sooner
    assert loads(num_queued=4400)
    assert not loads(num_queued=4500)
    costs.note(TransferRates(computed_tokens=100_000, compute_s=1.0))
    for _ in range(20):
        costs.note(TransferRates(computed_tokens=100_000, compute_s=1.0))
    assert not loads()
    now[0] = 31.0  # what was slow then may be fast by now
    assert loads()


def slow_costs(now: list[float], **rates: float) -> LoadCosts:
    """Of a store that was fast, beside a model that computes 10,000 tokens/s, and then `rates`."""
    costs = LoadCosts(1000, lambda: now[0])
    fast = TransferRates(10**9, 1.0, computed_tokens=10_000, compute_s=1.0)
    for _ in range(5):
        costs.note(fast)
    costs.note(TransferRates(**rates))  # type: ignore[arg-type]
    return costs


@pytest.mark.parametrize(
    "rates",
    [
        {"loaded_bytes": 1_000_000, "load_s": 10.0},
        {"failed_bytes": 1_000_000, "failed_s": 10.0},
    ],
    ids=["slow", "failed"],
)
def test_a_store_that_became_slow_is_left_alone_for_long(rates: dict[str, float]) -> None:
    """It was a thousand times as fast. Trying it every 30 s cost 10 s each time."""
    now = [0.0]
    costs = slow_costs(now, **rates)

    def loads() -> bool:
        return costs.cut(Prefix(0, 4096), ()) == 0

    assert not loads()
    tries = 0
    for _ in range(1000):
        now[0] += 1.0
        if loads():
            tries += 1
            now[0] += 10.0
            costs.note(TransferRates(**rates))  # type: ignore[arg-type]
    assert 2 <= tries <= 6
    now[0] += 601.0
    assert loads()
    costs.note(TransferRates(10**9, 1.0))
    assert loads()  # fast again: what was before counts no more


def test_a_load_that_found_nothing_says_nothing_of_the_store() -> None:
    now = [0.0]
    costs = slow_costs(now, failed_bytes=4_096_000, failed_s=0.001)  # four times as fast
    assert costs.cut(Prefix(0, 4096), ()) == 0


def test_one_load_of_half_the_speed_is_no_slow_store() -> None:
    now = [0.0]
    costs = slow_costs(now, loaded_bytes=10**9, load_s=2.0)
    assert costs.cut(Prefix(0, 4096), ()) == 0


def test_steps_of_a_few_tokens_do_not_count_as_a_rate() -> None:
    costs = LoadCosts(1000, lambda: 0.0)
    costs.note(TransferRates(loaded_bytes=1, load_s=1.0, computed_tokens=3, compute_s=0.001))
    assert costs.cut(Prefix(0, 500), ()) == 0


def test_a_store_as_fast_as_the_model_brings_half_while_the_other_half_is_computed() -> None:
    costs = LoadCosts(1000, lambda: 0.0)
    costs.note(TransferRates(loaded_bytes=500_000, load_s=1.0, computed_tokens=500, compute_s=1.0))
    pages = range(64, 4096, 64)
    assert costs.cut(Prefix(0, 4096), pages) == 2048
    assert costs.cut(Prefix(0, 4096), pages, num_queued=1024) == 2560
    # where others are to be computed as well, there is nothing to gain
    assert costs.cut(Prefix(0, 4096, num_ahead=5000), pages) == 0


def test_a_load_is_planned_to_take_half_of_what_it_may() -> None:
    costs = LoadCosts(1000, lambda: 0.0, timeout_s=10.0)
    costs.note(TransferRates(loaded_bytes=100_000, load_s=1.0, computed_tokens=100, compute_s=1.0))
    assert costs.cut(Prefix(0, 960), range(64, 960, 64)) == 512  # 4.5 s to load
    assert costs.cut(Prefix(0, 4096), range(64, 4096, 64)) == 4096 - 448
    assert costs.cut(Prefix(0, 4096), ()) == 4096


# --- what is stored behind the step


def save_orders(request: Request, num_computed: int, **flags: bool) -> list[tuple[int, int]]:
    """Token ranges that one step orders to be stored."""
    layout = make_layout(16)
    scheduler = StoreScheduler(layout, None, LoadCosts(1, time.monotonic), **flags)
    meta = scheduler.build_connector_meta({"r": (request, list(range(40)), num_computed)})
    return [(o.start_token, o.end_token) for save in meta.saves for o in save.objects]


def test_pages_of_the_prompt_are_stored_once_they_are_whole() -> None:
    request = Request("r", list(range(150)))
    assert save_orders(request, 63) == []
    assert save_orders(request, 150) == [(0, 64), (64, 128)]
    assert save_orders(request, 150, write_through=False) == []


def test_decode_stores_only_what_comes_after_the_prompt_it_was_given() -> None:
    commit = KVCommit(epoch=1, kv_namespace="", num_tokens=150, objects=[], connector="")
    request = Request(
        "r", list(range(150)), list(range(60)), kv_transfer_params=KVTransferParams(commit=commit)
    )
    assert save_orders(request, 210, write_through=False, store_decoded=True) == [(128, 192)]
    assert save_orders(request, 210, write_through=False) == []


# --- two engines and a node


def test_a_prompt_that_another_engine_computed_is_loaded(node: Node, make_core: MakeCore) -> None:
    first, second = make_core(node), make_core(node)
    cold = run(first, make_request("a", PROMPT))
    until(lambda: num_stored(node) == 3)
    assert run(second, make_request("a", PROMPT)) == cold
    assert second.stats.prompt_tokens_external_kv_transfer == 192
    assert second.stats.prompt_tokens_local_compute == 8
    # loaded just now: not sent again; the next one finds it in the engine itself
    time.sleep(0.1)
    assert control(node).GetStats(pb.GetStatsRequest()).puts_total == 3
    assert run(second, make_request("b", [*PROMPT, 1]))["b"]
    assert second.stats.prompt_tokens_external_kv_transfer == 192


def test_a_hand_off_of_a_loaded_prompt_names_what_is_stored(
    node: Node, make_core: MakeCore
) -> None:
    run(make_core(node), make_request("a", PROMPT))
    until(lambda: num_stored(node) == 3)
    prefill, decode, whole = make_core(node), make_core(node), make_core(None)
    sent = make_request("a", PROMPT, transfer=KVTransferParams(do_remote_decode=True))
    prefill.add_request(sent)
    commit: KVCommit | None = None
    tokens: list[int] = []
    while prefill.has_work:
        outputs = prefill.step()
        if outputs is not None:
            tokens += outputs.token_ids
            commit = next(iter(outputs.commits.values()), commit)
    assert prefill.stats.prompt_tokens_external_kv_transfer == 192
    assert commit is not None
    assert (commit.num_tokens, commit.num_cached_tokens) == (200, 192)
    assert control(node).GetStats(pb.GetStatsRequest()).puts_total == 4  # the tail is new
    params = KVTransferParams(commit=commit)
    rest = run(decode, make_request("a", PROMPT, output=tokens, transfer=params))
    assert decode.stats.prompt_tokens_external_kv_transfer == 200
    assert [*tokens, *rest["a"]] == run(whole, make_request("a", PROMPT))["a"]


def test_decoded_pages_are_found_by_the_next_turn(node: Node, make_core: MakeCore) -> None:
    first = make_core(node, store_decoded=True)
    answer = run(first, make_request("a", PROMPT, max_tokens=80))["a"]
    until(lambda: num_stored(node) == 4)
    turn = [*PROMPT, *answer, *range(20)]
    second, whole = make_core(node), make_core(None)
    assert run(second, make_request("b", turn)) == run(whole, make_request("b", turn))
    assert second.stats.prompt_tokens_external_kv_transfer == 256


def test_decode_stores_what_it_adds_to_a_prompt_that_was_handed_over(
    node: Node, make_core: MakeCore
) -> None:
    prefill = make_core(node)
    decode = make_core(node, write_through=False, store_decoded=True)
    prefill.add_request(make_request("a", PROMPT, transfer=KVTransferParams(do_remote_decode=True)))
    commits: list[KVCommit] = []
    first: list[int] = []
    while prefill.has_work:
        outputs = prefill.step()
        if outputs is not None:
            first += outputs.token_ids
            commits += outputs.commits.values()
    assert num_stored(node) == 4  # three pages and the tail
    params = KVTransferParams(commit=commits[0])
    request = make_request("a", PROMPT, output=first, transfer=params, max_tokens=130)
    answer = [*first, *run(decode, request)["a"]]
    # the pages that the answer completes, and none of those that prefill has stored
    until(lambda: num_stored(node) == 6)
    turn = [*PROMPT, *answer, 5, 6, 7]
    fresh, whole = make_core(node), make_core(None)
    assert run(fresh, make_request("b", turn)) == run(whole, make_request("b", turn))
    assert fresh.stats.prompt_tokens_external_kv_transfer == 320


def test_a_preempted_request_loads_back_what_it_had_stored(node: Node, make_core: MakeCore) -> None:
    requests = [
        make_request(name, [start, *PROMPT], max_tokens=60) for start, name in enumerate("abc", 1)
    ]
    whole = make_core(None, num_blocks=200)
    crowded = make_core(node, num_blocks=42)
    # so that nothing of it is left in the engine's own cache when it comes back
    assert run(crowded, *requests) == run(whole, *requests)
    assert crowded.stats.num_preemptions > 0
    assert crowded.stats.prompt_tokens_external_kv_transfer > 0


def test_a_store_that_hangs_delays_a_request_by_the_look_up_only(
    node: Node, make_core: MakeCore
) -> None:
    core = make_core(node, lookup_timeout_s=0.1)
    run(core, make_request("warm", [5, *PROMPT]))
    node.process.send_signal(signal.SIGSTOP)
    slowest = 0.0
    core.add_request(make_request("a", PROMPT, max_tokens=2))
    began = time.monotonic()
    output: list[int] = []
    while len(output) < 2:
        step_began = time.monotonic()
        outputs = core.step()
        slowest = max(slowest, time.monotonic() - step_began)
        output += outputs.token_ids if outputs is not None else []
    # far below the 60 s after which a call to the store gives up
    assert time.monotonic() - began < 30.0
    assert slowest < 20.0
    node.process.send_signal(signal.SIGCONT)


def test_saves_beyond_the_bound_are_dropped_and_counted(node: Node, make_core: MakeCore) -> None:
    core = make_core(node, lookup_timeout_s=0.1)
    worker = core._executor._connector  # type: ignore[attr-defined]
    worker._max_staged_bytes = 1
    node.process.send_signal(signal.SIGSTOP)
    run(core, make_request("a", PROMPT, max_tokens=1), make_request("b", [1, *PROMPT]))
    node.process.send_signal(signal.SIGCONT)
    assert core.stats.num_kv_save_drops >= 3
