"""KV leaves one cache as objects and arrives in another; what fails is told, never wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from diptych.connectors.page_orders import Outgoing
from diptych.connectors.shared_storage import FileStore
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.errors import TransferError
from tests.connectors.engines import OUR_BLOCKS, PROMPT, Engine, running
from tests.connectors.fakes import consumer, make_cache, make_layout, producer, same_kv, token_kv


class GatedStore:
    """A `FileStore` whose calls wait at a gate, and which fails when told to."""

    def __init__(self, root: Path) -> None:
        self.files = FileStore(root)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails = False
        self.calls = 0

    def put_many(self, items: Sequence[Outgoing], tenant: str) -> list[int | None]:
        self._pass()
        return self.files.put_many(items)

    def get_many(
        self, items: Sequence[tuple[bytes, int]], sink: Callable[[int, memoryview], object]
    ) -> list[int | None]:
        self._pass()
        return self.files.get_many(items, sink)

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        return

    def _pass(self) -> None:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(60)
        if self.fails:
            raise TransferError("the store is gone")


@pytest.mark.parametrize("decode_block_size", [16, 32, 64])
@pytest.mark.parametrize("prefill_block_size", [16, 32, 64])
def test_a_prompt_moves_whole_between_any_block_sizes(
    tmp_path: Path, prefill_block_size: int, decode_block_size: int
) -> None:
    prefill = Engine(FileStore(tmp_path), prefill_block_size, seed=1)
    decode = Engine(FileStore(tmp_path), decode_block_size)
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT, epoch=3))
        assert (commit.epoch, commit.num_tokens, commit.connector) == (3, 150, "TestConnector")
        assert [(o.start_token, o.end_token) for o in commit.objects] == [
            (0, 64),
            (64, 128),
            (128, 150),
        ]
        output = decode.load(consumer("r", PROMPT, commit))
        assert not output.failed_recving
        assert same_kv((prefill.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 0, 150)


def test_chunks_are_saved_as_they_are_computed(tmp_path: Path) -> None:
    prefill, request = Engine(FileStore(tmp_path), seed=1), producer("r", PROMPT)
    with running(prefill):
        ends = []
        for n in (30, 100, 130, 150):
            for order in prefill.step((request, n)).saves:
                ends.append((n, [o.end_token for o in order.objects], order.last))
        assert ends == [(100, [64], False), (130, [128], False), (150, [150], True)]
        assert prefill.scheduler.request_finished(request, OUR_BLOCKS)
        commit = prefill.wait("finished_sending").commits["r"]
        assert commit.num_tokens == 150


def test_blocks_may_be_overwritten_as_soon_as_the_step_ends(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill, decode = Engine(store, seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        before = prefill.cache.clone()
        store.gate.clear()
        prefill.step((producer("r", PROMPT), 150))
        prefill.cache.zero_()
        store.gate.set()
        commit = prefill.wait("finished_sending").commits["r"]
        decode.load(consumer("r", PROMPT, commit))
        assert same_kv((before, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 0, 150)


def test_only_what_the_prefix_cache_lacks_is_loaded(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        request = consumer("r", PROMPT, prefill.send(producer("r", PROMPT)))
        output = decode.load(request, num_local_tokens=80)
        assert not output.failed_recving
        ours, theirs = (decode.cache, OUR_BLOCKS), (prefill.cache, OUR_BLOCKS)
        assert same_kv(ours, theirs, 80, 150)
        assert same_kv(ours, (make_cache(make_layout(16)), OUR_BLOCKS), 0, 80)


def test_one_token_is_always_left_to_compute(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        request = consumer("r", PROMPT, prefill.send(producer("r", PROMPT)))
        request.output_token_ids.clear()
        assert decode.order_load(request) == 149
        assert decode.order_load(request) == 0


def test_a_commit_of_other_tokens_salt_or_size_is_not_loaded(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        salted = consumer("a", PROMPT, commit)
        salted.cache_salt = "s"
        salted.__post_init__()
        short = commit.objects[1]
        objects = [commit.objects[0], msgspec.structs.replace(short, num_bytes=8)]
        cut = msgspec.structs.replace(commit, objects=[*objects, commit.objects[2]])
        other = [*PROMPT[:100], 5, *PROMPT[101:]]
        matched = [
            decode.scheduler.get_num_new_matched_tokens(request, 0)[0]
            for request in (
                salted,
                consumer("b", other, commit),
                consumer("c", PROMPT, cut),
                consumer("d", PROMPT[:70], commit),
            )
        ]
        assert matched == [0, 64, 64, 64]


def test_a_lost_object_leaves_what_stands_before_it(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        FileStore(tmp_path).path(commit.objects[1].key).unlink()
        output = decode.load(consumer("r", PROMPT, commit))
        assert output.failed_recving == {"r": 64}
        assert same_kv((prefill.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 0, 64)


def test_bytes_that_do_not_have_the_commits_checksum_are_never_used(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        wrong = [msgspec.structs.replace(o, checksum=o.checksum ^ 1) for o in commit.objects]
        output = decode.load(
            consumer("r", PROMPT, msgspec.structs.replace(commit, objects=wrong)), 16
        )
        assert output.failed_recving == {"r": 16}
        # what came is in blocks that are computed now; nothing before them was touched
        assert not any(token_kv(decode.cache, OUR_BLOCKS, p).any() for p in range(16))


def test_a_dead_store_costs_a_commit_and_then_nothing(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    store.fails = True
    prefill = Engine(store, seed=1, limits=TransferLimits(retry_s=600.0))
    with running(prefill):
        first = prefill.send(producer("r", PROMPT))
        second = prefill.send(producer("s", PROMPT))
        assert (first.num_tokens, second.num_tokens, first.objects) == (0, 0, [])
        assert store.calls == 1, "a store that failed is left alone for a while"


def test_a_store_that_comes_back_is_used_again(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill = Engine(store, seed=1, limits=TransferLimits(retry_s=0.01))
    with running(prefill):
        store.fails = True
        assert prefill.send(producer("r", PROMPT)).num_tokens == 0
        store.fails = False
        time.sleep(0.02)
        assert prefill.send(producer("s", PROMPT)).num_tokens == 150


def test_a_failed_load_ends_with_the_local_prefix(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(store)
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        store.fails = True
        request = consumer("r", PROMPT, commit)
        assert decode.load(request, 32).failed_recving == {"r": 32}
        assert decode.order_load(request, 16) == 0, "a load is tried once"


def test_an_aborted_load_is_reported_only_when_its_read_has_ended(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(store)
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        store.gate.clear()
        decode.order_load(consumer("r", PROMPT, commit))
        decode.step()
        assert store.entered.wait(60)
        decode.scheduler.abort("r")
        decode.step()
        time.sleep(0.05)
        assert decode.worker.get_finished().empty, "the blocks are still a target"
        store.gate.set()
        assert decode.wait("finished_recving").failed_recving == {"r": 0}
        # what came is in blocks that are computed now; nothing before them was touched
        assert not any(token_kv(decode.cache, OUR_BLOCKS, p).any() for p in range(16))


def test_a_load_aborted_before_its_step_is_reported_too(tmp_path: Path) -> None:
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        decode.order_load(consumer("r", PROMPT, commit))
        decode.scheduler.abort("r")
        decode.step()
        decode.wait("finished_recving")
        # what came is in blocks that are computed now; nothing before them was touched
        assert not any(token_kv(decode.cache, OUR_BLOCKS, p).any() for p in range(16))


def test_an_aborted_hand_over_is_reported_without_a_commit(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill, request = Engine(store, seed=1), producer("r", PROMPT)
    with running(prefill):
        store.gate.clear()
        prefill.step((request, 150))
        assert prefill.scheduler.request_finished(request, OUR_BLOCKS)
        prefill.scheduler.abort("r")
        prefill.step()
        store.gate.set()
        assert prefill.wait("finished_sending").commits == {}


def test_a_request_that_ends_before_its_prompt_does_needs_no_report(tmp_path: Path) -> None:
    prefill, request = Engine(FileStore(tmp_path), seed=1), producer("r", PROMPT)
    with running(prefill):
        prefill.step((request, 100))
        assert not prefill.scheduler.request_finished(request, OUR_BLOCKS)
        prefill.step()
        assert not prefill.transfers._sendings
        # the same id again starts over
        assert prefill.send(producer("r", PROMPT)).num_tokens == 150


def test_a_save_beyond_the_bound_is_cut_and_the_rest_still_covers_a_prefix(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    token_bytes = 2 * 3 * 2 * 4 * 4
    limits = TransferLimits(max_staged_bytes=140 * token_bytes)
    prefill, request = Engine(store, seed=1, limits=limits), producer("r", [*range(290)])
    with running(prefill):
        store.gate.clear()
        prefill.step((request, 64))
        prefill.step((request, 256))  # of three more pages one finds room
        assert prefill.transfers.staged_bytes == 128 * token_bytes
        store.gate.set()
        while prefill.transfers.staged_bytes:
            time.sleep(0.002)
        prefill.step((request, 290))
        assert prefill.wait("finished_sending").commits["r"].num_tokens == 128


def test_a_save_that_finds_nothing_waiting_is_staged_whatever_its_size(tmp_path: Path) -> None:
    prefill = Engine(FileStore(tmp_path), seed=1, limits=TransferLimits(max_staged_bytes=1))
    with running(prefill):
        assert prefill.send(producer("r", PROMPT)).num_tokens == 150


def test_a_transfer_past_its_deadline_is_given_up(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    decode = Engine(store, limits=TransferLimits(transfer_timeout_s=3.0))
    prefill = Engine(FileStore(tmp_path), seed=1)
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        store.gate.clear()
        for name in ("a", "b"):
            decode.order_load(consumer(name, PROMPT, commit))
        decode.step()
        assert store.entered.wait(60)
        time.sleep(3.1)
        store.gate.set()
        output = decode.wait("finished_recving", "b")
        assert output.failed_recving["b"] == 0
        assert store.calls == 1, "the second was not begun"


def test_more_loads_than_the_queue_holds_fail_at_once(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    decode = Engine(store, limits=TransferLimits(max_queued_transfers=1))
    prefill = Engine(FileStore(tmp_path), seed=1)
    with running(prefill, decode):
        commit = prefill.send(producer("r", PROMPT))
        store.gate.clear()
        decode.order_load(consumer("a", PROMPT, commit))
        decode.step()
        assert store.entered.wait(60)
        for name in "bcd":
            decode.order_load(consumer(name, PROMPT, commit))
        decode.step()
        assert decode.worker.get_finished().failed_recving == {"c": 0, "d": 0}
        store.gate.set()
        assert not decode.wait("finished_recving", "b").failed_recving


def test_an_objects_first_writer_wins_and_later_commits_name_its_bytes(tmp_path: Path) -> None:
    first, second = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path), seed=2)
    decode = Engine(FileStore(tmp_path))
    with running(first, second, decode):
        first.send(producer("r", PROMPT))
        commit = second.send(producer("r", PROMPT))
        assert not decode.load(consumer("r", PROMPT, commit)).failed_recving
        assert same_kv((first.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 0, 150)


def test_shutdown_finishes_what_was_queued(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    prefill = Engine(store, seed=1)
    store.gate.clear()
    prefill.step((producer("r", PROMPT), 150))
    store.gate.set()
    prefill.worker.shutdown()
    assert prefill.worker.get_finished().commits["r"].num_tokens == 150
