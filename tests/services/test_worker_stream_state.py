"""Whatever breaks and resumes, a frame arrives once and in order, or the gap is told."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.proto import worker_pb2
from diptych.worker.stream_state import PairState, StreamState

MAX_FRAMES = 4


def step(number: int) -> worker_pb2.WorkerFrame:
    return worker_pb2.WorkerFrame(request_ids=["a"], first_positions=[number], token_counts=[1])


def new_state(max_frames: int = MAX_FRAMES) -> StreamState:
    return StreamState("w1", max_frames=max_frames, grace_s=5.0)


class Router:
    """The other end: sees frames, acknowledges, reconnects from what it saw."""

    def __init__(self) -> None:
        self.state = new_state()
        self.incarnation = ""
        self.last = 0
        self.generation = -1
        self.got: list[int] = []
        self.pushed = 0
        self.first = 0  # what was pushed before this is lost, and the router was told
        self.wire: list[worker_pb2.WorkerFrame] = []

    def push(self) -> None:
        self.state.push(step(self.pushed))
        self.pushed += 1
        if self.state.state is PairState.DROPPED:
            self.state = new_state()  # as the hub does: forgotten, the router must come again
            self.generation = -1

    def send(self) -> None:
        frame = self.state.next_frame(self.generation)
        if frame is not None:
            copy = worker_pb2.WorkerFrame()
            copy.CopyFrom(frame)
            self.wire.append(copy)

    def receive(self) -> None:
        if self.wire:
            frame = self.wire.pop(0)
            assert frame.sequence == self.last + 1
            self.last = frame.sequence
            self.got.extend(frame.first_positions)

    def ack(self) -> None:
        if self.generation == self.state.generation:
            self.state.ack(self.last)

    def reconnect(self) -> None:
        self.wire.clear()  # what was on its way is lost
        answer = self.state.hello(self.incarnation, self.last)
        self.generation = self.state.generation
        self.incarnation = answer.incarnation
        if answer.gap:
            self.first = self.pushed
            self.got = []
        else:
            assert answer.sequence == self.last
        self.last = answer.sequence

    def break_stream(self) -> None:
        self.state.detach(self.generation, now=0.0)
        self.wire.clear()

    def check(self) -> None:
        assert self.got == list(range(self.first, self.first + len(self.got)))


ACTIONS = ["push", "push", "send", "send", "receive", "receive", "ack", "reconnect", "break_stream"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=80))
def test_any_interleaving_delivers_each_step_once_in_order_or_tells_the_gap(
    actions: list[str],
) -> None:
    router = Router()
    router.reconnect()
    for action in actions:
        getattr(router, action)()
        router.check()
    router.reconnect()
    for _ in range(len(actions) + 1):
        router.send()
        router.receive()
        router.ack()
    router.check()
    assert router.first + len(router.got) == router.pushed
    assert router.state.flushed


def test_a_break_with_nothing_lost_resumes_without_a_gap() -> None:
    state = new_state()
    first = state.hello("", 0)
    assert (first.sequence, first.gap, first.incarnation) == (0, False, "w1")
    state.push(step(0))
    frame = state.next_frame(state.generation)
    assert frame is not None
    state.detach(state.generation, now=1.0)
    state.push(step(1))
    answer = state.hello("w1", 0)  # the frame was lost on the wire
    assert (answer.sequence, answer.gap) == (0, False)
    frames = [state.next_frame(state.generation) for _ in range(3)]
    assert [None if f is None else list(f.first_positions) for f in frames] == [[0], [1], None]


def test_another_incarnation_or_a_forgotten_sequence_is_a_gap() -> None:
    assert new_state().hello("w0", 7).gap
    state = new_state()
    state.hello("", 0)
    for number in range(2):
        state.push(step(number))
        assert state.next_frame(state.generation) is not None
    state.ack(2)
    assert state.hello("w1", 1).gap
    assert not state.hello("w1", 2).gap
    assert state.hello("w1", 3).gap


def test_a_replaced_stream_gets_nothing_and_its_end_changes_nothing() -> None:
    state = new_state()
    state.hello("", 0)
    old = state.generation
    state.hello("", 0)
    state.push(step(0))
    assert state.next_frame(old) is None
    state.detach(old, now=0.0)
    assert state.state is PairState.ATTACHED
    assert state.next_frame(state.generation) is not None


def test_a_router_that_never_acknowledges_gets_merged_steps_and_is_dropped_at_the_bound() -> None:
    state = new_state()
    state.hello("", 0)
    for number in range(MAX_FRAMES):
        state.push(step(number))
        assert state.next_frame(state.generation) is not None
    for number in range(MAX_FRAMES):
        state.push(step(MAX_FRAMES + number))
        assert state.next_frame(state.generation) is None
    state.ack(1)
    merged = state.next_frame(state.generation)
    assert merged is not None
    assert list(merged.first_positions) == [4, 5, 6, 7]
    for number in range(MAX_FRAMES + 1):
        assert state.state is PairState.ATTACHED
        state.push(step(8 + number))
    assert state.state is PairState.DROPPED
    assert state.flushed


def test_a_pair_is_flushed_once_its_stream_has_taken_everything() -> None:
    state = new_state()
    state.hello("", 0)
    state.push(step(0))
    assert not state.flushed
    assert state.next_frame(state.generation) is not None
    assert state.flushed
    state.hello("w1", 0)  # the frame was lost on the wire
    assert not state.flushed


def test_a_gone_router_expires_after_its_grace_and_not_while_attached() -> None:
    state = new_state()
    state.hello("", 0)
    assert not state.expired(100.0)
    state.detach(state.generation, now=100.0)
    assert not state.expired(104.9)
    assert state.expired(105.0)
    state.hello("w1", 0)
    assert not state.expired(200.0)
