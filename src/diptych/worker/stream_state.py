"""The outputs of one router-worker pair: numbered, kept until acknowledged, resumable. Pure.

Frames wait in two places. `_kept` holds numbered frames from the first unacknowledged one on; a
stream that breaks is resumed from there. Steps that come while no stream takes them, or while
`max_frames` are kept, merge in `_pending`, whose frames get their number when they are sent. A
router that lets `max_frames` steps pend as well is dropped.
"""

from __future__ import annotations

import enum
from collections import deque

from diptych.proto import worker_pb2
from diptych.worker.frames import merge_frame

# Bounds the bytes of one frame.
MAX_MERGED_ENTRIES = 1024


class PairState(enum.Enum):
    """Where a pair stands."""

    ATTACHED = enum.auto()
    DETACHED = enum.auto()
    DROPPED = enum.auto()


class StreamState:
    """One pair. Times are seconds on the caller's monotonic clock."""

    def __init__(self, incarnation: str, *, max_frames: int, grace_s: float) -> None:
        self.state = PairState.DETACHED
        self.generation = 0
        self._incarnation = incarnation
        self._max_frames = max_frames
        self._grace_s = grace_s
        self._gone_at = 0.0
        self._kept: deque[worker_pb2.WorkerFrame] = deque()
        self._acked = 0  # sequence before the first kept frame
        self._sent = 0  # sequence of the last frame sent on this stream
        self._pending: deque[worker_pb2.WorkerFrame] = deque()
        self._num_pending = 0  # steps in them

    def hello(self, worker_incarnation: str, last_sequence: int) -> worker_pb2.WorkerFrame:
        """A stream opens: the answer to its Hello, the older stream's generation being over.

        After an answer with `gap` the caller aborts the pair's requests.
        """
        self.generation += 1
        self.state = PairState.ATTACHED
        gap = not self._can_resume(worker_incarnation, last_sequence)
        if gap:
            # numbering goes on, so that a frame of the past is never taken for a new one
            self._acked += len(self._kept)
            self._kept.clear()
            self._clear_pending()
            self._sent = self._acked
        else:
            self._sent = last_sequence
            self.ack(last_sequence)
        return worker_pb2.WorkerFrame(sequence=self._sent, incarnation=self._incarnation, gap=gap)

    def _can_resume(self, worker_incarnation: str, last_sequence: int) -> bool:
        if worker_incarnation == "":
            return last_sequence == 0 and self._acked == 0
        # a pair of this incarnation that was forgotten since is not the one the router knew
        known = worker_incarnation == self._incarnation and self.generation > 1
        return known and self._acked <= last_sequence <= self._acked + len(self._kept)

    def push(self, frame: worker_pb2.WorkerFrame) -> None:
        """Take one step's frame. Where the bound is passed, the pair is dropped."""
        if self.state is PairState.DROPPED:
            return
        last = self._pending[-1] if self._pending else None
        if last and len(last.request_ids) + len(frame.request_ids) <= MAX_MERGED_ENTRIES:
            merge_frame(last, frame)
        else:
            self._pending.append(frame)
        self._num_pending += 1
        if self._num_pending > self._max_frames:
            self.state = PairState.DROPPED
            self._kept.clear()
            self._clear_pending()

    def next_frame(self, generation: int) -> worker_pb2.WorkerFrame | None:
        """The next frame for the stream of `generation`, or None if there is none now."""
        if self.state is not PairState.ATTACHED or generation != self.generation:
            return None
        index = self._sent - self._acked
        if index == len(self._kept) and not self._number_pending():
            return None
        self._sent += 1
        return self._kept[index]

    def _number_pending(self) -> bool:
        if not self._pending or len(self._kept) >= self._max_frames:
            return False
        frame = self._pending.popleft()
        frame.sequence = self._acked + len(self._kept) + 1
        frame.incarnation = self._incarnation
        self._kept.append(frame)
        self._num_pending = self._num_pending if self._pending else 0
        return True

    def _clear_pending(self) -> None:
        self._pending.clear()
        self._num_pending = 0

    def ack(self, sequence: int) -> None:
        """Forget frames up to `sequence`, as far as they were sent."""
        while self._acked < min(sequence, self._sent):
            self._kept.popleft()
            self._acked += 1

    def detach(self, generation: int, now: float) -> None:
        """The stream of `generation` is over; one that was replaced changes nothing."""
        if generation == self.generation and self.state is PairState.ATTACHED:
            self.state = PairState.DETACHED
            self._gone_at = now

    def expired(self, now: float) -> bool:
        """Whether the router has been without a stream for its grace time."""
        return self.state is PairState.DETACHED and now - self._gone_at >= self._grace_s

    @property
    def flushed(self) -> bool:
        """Whether nothing is left to send: what a stream has taken reaches the router before the
        stream's end does."""
        all_sent = self._sent == self._acked + len(self._kept)
        return not self._pending and (all_sent or self.state is not PairState.ATTACHED)
