"""One step's outputs as one packed frame per router. Pure."""

from __future__ import annotations

from diptych.engine.request import EngineCoreOutputs, FinishReason, SchedulerStats
from diptych.proto import worker_pb2
from diptych.wire import commit_to_proto, logprobs_to_proto
from diptych.worker.requests import Owned, RequestTable


def load_to_proto(stats: SchedulerStats) -> worker_pb2.WorkerLoad:
    """How much work the engine has after a step."""
    return worker_pb2.WorkerLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_pending_tokens=stats.num_pending_tokens,
        kv_usage=stats.kv_usage,
        num_kv_blocks=stats.num_kv_blocks,
    )


def split_outputs(
    outputs: EngineCoreOutputs, table: RequestTable
) -> dict[str, worker_pb2.WorkerFrame]:
    """Frames by router, without sequence and incarnation.

    An entry whose attempt is not in the table (cancelled, replaced) is dropped; the attempt of an
    entry that ends it leaves the table.
    """
    frames: dict[str, worker_pb2.WorkerFrame] = {}
    start = 0
    for entry, engine_id in enumerate(outputs.request_ids):
        end = start + outputs.token_counts[entry]
        owned = table.remove(engine_id) if _ends(outputs, entry) else table.get(engine_id)
        if owned is not None:
            table.started(engine_id)
            frame = frames.setdefault(owned.router, worker_pb2.WorkerFrame())
            _append(frame, owned, outputs, entry, outputs.token_ids[start:end])
        start = end
    load = load_to_proto(outputs.stats)
    for frame in frames.values():
        frame.load.CopyFrom(load)
    return frames


def _ends(outputs: EngineCoreOutputs, entry: int) -> bool:
    """Whether the entry is the last of its attempt: a reason, an error, or the commit."""
    return (
        outputs.finish_reasons[entry] != FinishReason.UNSPECIFIED
        or entry in outputs.errors
        or entry in outputs.commits
    )


def _append(
    frame: worker_pb2.WorkerFrame,
    owned: Owned,
    outputs: EngineCoreOutputs,
    entry: int,
    token_ids: list[int],
) -> None:
    index = len(frame.request_ids)
    frame.request_ids.append(owned.request_id)
    frame.epochs.append(owned.epoch)
    frame.first_positions.append(outputs.first_positions[entry])
    frame.token_counts.append(len(token_ids))
    frame.token_ids.extend(token_ids)
    frame.finish_reasons.append(outputs.finish_reasons[entry])
    frame.stop_token_ids.append(outputs.stop_token_ids[entry])
    frame.num_cached_tokens.append(outputs.num_cached_tokens[entry])
    extra = worker_pb2.EntryExtra(entry=index)
    if entry in outputs.logprobs:
        extra.logprobs.CopyFrom(logprobs_to_proto(outputs.logprobs[entry]))
    if entry in outputs.prompt_logprobs:
        extra.prompt_logprobs.CopyFrom(logprobs_to_proto(outputs.prompt_logprobs[entry]))
    if entry in outputs.commits:
        extra.commit.CopyFrom(commit_to_proto(outputs.commits[entry]))
    if entry in outputs.errors:
        extra.error = outputs.errors[entry]
    if entry in outputs.handoff_failures:
        extra.handoff_failed = outputs.handoff_failures[entry]
    if len(extra.ListFields()) > (1 if index else 0):
        frame.extras.append(extra)


def error_frames(ended: list[Owned], message: str) -> dict[str, worker_pb2.WorkerFrame]:
    """Frames by router that end attempts with an error."""
    frames: dict[str, worker_pb2.WorkerFrame] = {}
    for owned in ended:
        outputs = EngineCoreOutputs(
            request_ids=[owned.engine_id],
            first_positions=[0],
            token_counts=[0],
            finish_reasons=[FinishReason.ERROR],
            stop_token_ids=[-1],
            num_cached_tokens=[0],
            errors={0: message},
        )
        frame = frames.setdefault(owned.router, worker_pb2.WorkerFrame())
        _append(frame, owned, outputs, 0, [])
    return frames


def merge_frame(into: worker_pb2.WorkerFrame, later: worker_pb2.WorkerFrame) -> None:
    """Append the entries of a later step; its load replaces the earlier one."""
    shift = len(into.request_ids)
    first = len(into.extras)
    if later.HasField("load"):
        into.load.Clear()  # a merge keeps what the later message has at zero
    into.MergeFrom(later)
    for extra in into.extras[first:]:
        extra.entry += shift
