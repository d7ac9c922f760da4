"""A worker's packed frame to one entry per request."""

from __future__ import annotations

from diptych.engine.request import FinishReason
from diptych.errors import EngineError
from diptych.proto import worker_pb2
from diptych.services.router.route import Entry
from diptych.wire import commit_from_proto, logprobs_from_proto

_MAX_TEXT = 500


def one_line(text: str) -> str:
    """What a worker says in words, as one line of bounded length: it goes to logs and clients."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_TEXT])
    line = " ".join(shown.split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def read_frame(frame: worker_pb2.WorkerFrame) -> list[tuple[str, Entry]]:
    """(request id, entry) for each entry of the frame, in order.

    Raises:
        EngineError: the frame contradicts itself; the worker cannot be trusted any more.
    """
    num_entries = len(frame.request_ids)
    arrays = (
        frame.epochs,
        frame.first_positions,
        frame.token_counts,
        frame.finish_reasons,
        frame.stop_token_ids,
        frame.num_cached_tokens,
    )
    if any(len(array) != num_entries for array in arrays):
        raise EngineError(f"frame {frame.sequence} has arrays of unequal length")
    if sum(frame.token_counts) != len(frame.token_ids):
        raise EngineError(f"frame {frame.sequence} does not have as many tokens as it says")
    extras = {extra.entry: extra for extra in frame.extras}
    entries: list[tuple[str, Entry]] = []
    start = 0
    for index, request_id in enumerate(frame.request_ids):
        end = start + frame.token_counts[index]
        entries.append(
            (request_id, _entry(frame, index, frame.token_ids[start:end], extras.get(index)))
        )
        start = end
    return entries


def _entry(
    frame: worker_pb2.WorkerFrame,
    index: int,
    token_ids: list[int],
    extra: worker_pb2.EntryExtra | None,
) -> Entry:
    stop = frame.stop_token_ids[index]
    entry = Entry(
        epoch=frame.epochs[index],
        first_position=frame.first_positions[index],
        token_ids=list(token_ids),
        finish_reason=_finish_reason(frame.finish_reasons[index]),
        stop_token_id=None if stop < 0 else stop,
        num_cached_tokens=frame.num_cached_tokens[index],
    )
    return entry if extra is None else _with_extra(entry, extra)


def _finish_reason(number: int) -> FinishReason:
    try:
        return FinishReason(number)
    except ValueError:  # proto3 enums are open
        raise EngineError(f"finish reason {number} is not known") from None


def _with_extra(entry: Entry, extra: worker_pb2.EntryExtra) -> Entry:
    def has(name: str) -> bool:
        return bool(extra.HasField(name))

    logprobs = logprobs_from_proto(extra.logprobs) if has("logprobs") else None
    if logprobs is not None and len(logprobs.ranks) < len(entry.token_ids):
        raise EngineError("an entry has tokens without log probabilities")
    return Entry(
        epoch=entry.epoch,
        first_position=entry.first_position,
        token_ids=entry.token_ids,
        finish_reason=entry.finish_reason,
        stop_token_id=entry.stop_token_id,
        num_cached_tokens=entry.num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=(
            logprobs_from_proto(extra.prompt_logprobs) if has("prompt_logprobs") else None
        ),
        commit=commit_from_proto(extra.commit, may_be_direct=True) if has("commit") else None,
        error=one_line(extra.error) if has("error") else None,
        handoff_failed=one_line(extra.handoff_failed) if has("handoff_failed") else None,
    )
