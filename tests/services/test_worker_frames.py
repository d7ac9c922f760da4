"""Outputs of a step reach the routers whose requests they are."""

from __future__ import annotations

import pytest

from diptych.engine.request import (
    EngineCoreOutputs,
    FinishReason,
    KVCommit,
    SchedulerStats,
    TokenLogprobs,
)
from diptych.errors import DuplicateRequestError, StaleTicketError
from diptych.proto import worker_pb2
from diptych.worker.frames import merge_frame, split_outputs
from diptych.worker.requests import Owned, RequestTable


def table_of(*owned: Owned) -> RequestTable:
    table = RequestTable()
    for one in owned:
        table.add(one)
    return table


def outputs(
    *entries: tuple[str, int, list[int], FinishReason], **more: object
) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        request_ids=[e[0] for e in entries],
        first_positions=[e[1] for e in entries],
        token_counts=[len(e[2]) for e in entries],
        token_ids=[token for e in entries for token in e[2]],
        finish_reasons=[e[3] for e in entries],
        stop_token_ids=[-1 for _ in entries],
        num_cached_tokens=[0 for _ in entries],
        stats=SchedulerStats(num_running=2, num_kv_blocks=10, num_free_kv_blocks=5),
        **more,  # type: ignore[arg-type]
    )


RUNNING, STOP = FinishReason.UNSPECIFIED, FinishReason.STOP


def test_each_router_gets_its_own_entries_with_their_tokens_and_extras() -> None:
    table = table_of(Owned("a", 1, "r1"), Owned("b", 2, "r2"), Owned("c", 1, "r1"))
    logprobs = TokenLogprobs(width=1, token_ids=[9], logprobs=[-0.5], ranks=[1])
    step = outputs(
        ("a#1", 0, [5, 6], RUNNING),
        ("b#2", 3, [7], STOP),
        ("c#1", 1, [9], RUNNING),
        logprobs={2: logprobs},
    )

    frames = split_outputs(step, table)

    assert set(frames) == {"r1", "r2"}
    r1 = frames["r1"]
    assert list(r1.request_ids) == ["a", "c"]
    assert list(r1.token_ids) == [5, 6, 9]
    assert list(r1.token_counts) == [2, 1]
    assert [(e.entry, list(e.logprobs.token_ids)) for e in r1.extras] == [(1, [9])]
    assert (r1.load.num_running, r1.load.kv_usage) == (2, 0.5)
    r2 = frames["r2"]
    assert (list(r2.request_ids), list(r2.epochs), list(r2.first_positions)) == (["b"], [2], [3])
    assert list(r2.finish_reasons) == [STOP]
    assert not r2.extras


def test_a_request_that_ended_leaves_the_table() -> None:
    table = table_of(*(Owned(name, 1, "r") for name in "abcd"))
    commit = KVCommit(epoch=1, kv_namespace="", num_tokens=0, objects=[], connector="x")
    step = outputs(
        ("a#1", 0, [1], STOP),
        ("b#1", 1, [], RUNNING),
        ("c#1", 1, [], RUNNING),
        ("d#1", 0, [1], RUNNING),
        commits={1: commit},
        errors={2: "the cache is gone"},
    )
    frame = split_outputs(step, table)["r"]
    assert len(frame.request_ids) == 4
    assert [e.entry for e in frame.extras] == [1, 2]
    assert frame.extras[0].HasField("commit")
    assert len(table) == 1
    assert table.get("d#1") is not None


def test_entries_of_cancelled_or_replaced_attempts_are_dropped() -> None:
    table = table_of(Owned("a", 1, "r"), Owned("b", 1, "r"))
    assert table.cancel("r", "b", 1) is not None
    assert table.add(Owned("a", 2, "r")) == Owned("a", 1, "r")
    step = outputs(("a#1", 0, [1], STOP), ("b#1", 0, [2], RUNNING), ("a#2", 0, [3], RUNNING))
    frame = split_outputs(step, table)["r"]
    assert (list(frame.request_ids), list(frame.epochs), list(frame.token_ids)) == (["a"], [2], [3])


def test_an_attempt_replaces_only_an_older_one() -> None:
    table = table_of(Owned("a", 2, "r"))
    with pytest.raises(DuplicateRequestError):
        table.add(Owned("a", 2, "r"))
    with pytest.raises(StaleTicketError):
        table.add(Owned("a", 1, "r"))


def test_only_the_owner_cancels_and_not_beyond_the_epoch() -> None:
    table = table_of(Owned("a", 2, "r"))
    assert table.cancel("other", "a", 2) is None
    assert table.cancel("r", "a", 1) is None
    assert table.cancel("r", "a", 2) == Owned("a", 2, "r")
    assert len(table) == 0


def test_merged_frames_keep_entries_in_order_and_the_later_load() -> None:
    table = table_of(Owned("a", 1, "r"))
    logprobs = TokenLogprobs(width=1, token_ids=[9], logprobs=[-0.5], ranks=[1])
    first = split_outputs(outputs(("a#1", 0, [1], RUNNING), logprobs={0: logprobs}), table)["r"]
    later = split_outputs(outputs(("a#1", 1, [2], STOP), logprobs={0: logprobs}), table)["r"]
    later.load.CopyFrom(worker_pb2.WorkerLoad(num_running=0, num_waiting=3))
    merge_frame(first, later)
    assert list(first.token_ids) == [1, 2]
    assert list(first.first_positions) == [0, 1]
    assert [e.entry for e in first.extras] == [0, 1]
    assert (first.load.num_running, first.load.num_waiting) == (0, 3)
