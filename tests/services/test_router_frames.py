"""A worker's frame that contradicts itself is a named error, so that its requests go elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diptych.engine.request import FinishReason
from diptych.errors import DiptychError
from diptych.proto import common_pb2, worker_pb2
from diptych.services.router.frames import read_frame


def frame() -> worker_pb2.WorkerFrame:
    """Two tokens of one request, with two alternatives each."""
    return worker_pb2.WorkerFrame(
        sequence=1,
        request_ids=["a"],
        epochs=[1],
        first_positions=[0],
        token_counts=[2],
        token_ids=[5, 6],
        finish_reasons=[common_pb2.FINISH_REASON_STOP],
        stop_token_ids=[6],
        num_cached_tokens=[0],
        extras=[
            worker_pb2.EntryExtra(
                entry=0,
                logprobs=common_pb2.PackedLogprobs(
                    width=2, token_ids=[5, 1, 6, 2], logprobs=[-1, -2, -3, -4], ranks=[1, 2]
                ),
            )
        ],
    )


def test_a_whole_frame_is_read() -> None:
    [(request_id, entry)] = read_frame(frame())

    assert (request_id, entry.token_ids, entry.stop_token_id) == ("a", [5, 6], 6)
    assert entry.finish_reason is FinishReason.STOP
    assert entry.logprobs is not None
    assert entry.logprobs.ranks == [1, 2]


BROKEN: dict[str, Callable[[worker_pb2.WorkerFrame], object]] = {
    "an array is short": lambda f: f.epochs.pop(),
    "a token is missing": lambda f: f.token_ids.pop(),
    "a finish reason of a later version": lambda f: f.finish_reasons.__setitem__(0, 77),
    "logprobs without a width": lambda f: f.extras[0].logprobs.ClearField("width"),
    "a rank for every alternative": lambda f: f.extras[0].logprobs.ranks.extend([1, 2]),
    "a logprob is missing": lambda f: f.extras[0].logprobs.logprobs.pop(),
    "a token without logprobs": lambda f: f.extras[0].logprobs.CopyFrom(
        common_pb2.PackedLogprobs(width=1, token_ids=[5], logprobs=[-1], ranks=[1])
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_frame_that_contradicts_itself_is_refused(name: str) -> None:
    broken = frame()
    BROKEN[name](broken)

    with pytest.raises(DiptychError):
        read_frame(broken)


@pytest.mark.parametrize("field", ["error", "handoff_failed"])
def test_what_a_worker_says_of_a_failure_is_one_short_line(field: str) -> None:
    said = frame()
    said.extras[0].ClearField("logprobs")
    setattr(said.extras[0], field, "Traceback:\n\tFile \x1b[31m\0x\u2028" + "e" * 100_000)

    [(_, entry)] = read_frame(said)
    text = getattr(entry, field)
    assert text.startswith("Traceback: File [31m x eee")
    assert len(text) == 500
    assert text.isprintable()
