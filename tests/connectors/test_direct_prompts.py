"""Both sides of a direct hand-off in virtual time, over a network and schedules of any kind.

Blocks really hold bytes here. A side that gives blocks back has them overwritten at once, so that
KV that was read too late, or of another prompt, does not pass for the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.connectors.direct_attempt import TakenPrompt
from diptych.connectors.direct_given import GivenPrompt, GivenPrompts
from diptych.connectors.direct_messages import TO_DECODE, HandoffMessage
from diptych.connectors.direct_reports import DirectReports
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_taken import TakenPrompts
from diptych.connectors.handoff import Event
from diptych.connectors.kv_checksums import HostChecksums
from diptych.connectors.peer_reads import RangeRead, RangeResult
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.base import ReadFailure, ReadState
from diptych.errors import TransferError

SETTINGS = DirectSettings(
    repeat_s=1, lease_s=20, reserve_s=15, read_s=10, silence_s=10, verdict_s=10
)
PEER, OURS = "prefill", "decode"
NUM_BLOCKS, ATOM = 16, 8
P_BLOCK, D_BLOCK = 4, 8
KINDS = ["go", "go", "go", "go", "step", "deliver", "deliver", "read", "read", "read", "lose"]
KINDS += ["double", "fail", "hang", "time", "preempt", "release", "end", "gone", "corrupt"]
KINDS += ["stored"]


def pool(block_size: int, num_blocks: int) -> PoolGeometry:
    return PoolGeometry(
        num_blocks=num_blocks,
        block_size=block_size,
        heads=Span(0, 2),
        layers=Span(0, 1),
        atom_bytes=ATOM,
    )


class Blocks:
    """One side's pool: `[num_blocks, 2 heads, 1 layer, 2 parts, slots, atom]`."""

    def __init__(self, block_size: int, seed: int) -> None:
        self.geometry = pool(block_size, NUM_BLOCKS)
        self.size = block_size
        self.bytes = np.zeros(self.geometry.num_bytes, np.uint8)
        self.rows = self.bytes.reshape(NUM_BLOCKS, 2, 1, 2, block_size, ATOM)
        self._rng = np.random.default_rng(seed)
        self.scramble(range(NUM_BLOCKS))
        self.free = list(range(NUM_BLOCKS))

    def scramble(self, ids: Iterator[int] | range | list[int]) -> None:
        for block in ids:
            self.rows[block] = self._rng.integers(0, 256, self.rows[block].shape, np.uint8)

    def take(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.size))]

    def give_back(self, ids: list[int]) -> None:
        assert not set(ids) & set(self.free)
        self.free += ids
        self.scramble(ids)

    def at(self, ids: list[int], position: int) -> np.ndarray:
        return self.rows[ids[position // self.size], :, :, :, position % self.size]


@dataclass
class Reads:
    """Reads that copy when they are told to."""

    source: Blocks
    target: Blocks
    open: dict[str, RangeRead] = field(default_factory=dict)
    results: list[RangeResult] = field(default_factory=list)
    hung: set[str] = field(default_factory=set)

    def read(self, order: RangeRead) -> None:
        assert order.read_id not in self.open
        self.open[order.read_id] = order

    def cancel(self, read_id: str) -> None:
        if read_id in self.open:
            self.end(read_id, ReadState.QUARANTINED)
            self.hung.add(read_id)

    def copy(self, read_id: str) -> None:
        """The bytes as they are now; a late one may still write."""
        order = self.open[read_id]
        ours, theirs = order.target_blocks.ids.tolist(), order.source_blocks.ids.tolist()
        for position in range(order.start_token, order.end_token):
            self.target.at(ours, position)[:] = self.source.at(theirs, position)

    def end(self, read_id: str, state: ReadState) -> None:
        order = self.open[read_id]
        if state is not ReadState.QUARANTINED:
            del self.open[read_id]
            self.hung.discard(read_id)
        failure = None if state is ReadState.DONE else ReadFailure.DEADLINE
        self.results.append(
            RangeResult(order.read_id, state, failure, "", 0, 0.0, frozenset({"test"}))
        )


class World:
    """A prefill and a decode engine with one request each, and all that lies between them."""

    def __init__(
        self,
        num_tokens: int,
        local_tokens: int,
        *,
        verify: bool = True,
        stores: tuple[bool, bool] = (False, False),
        is_offered: bool = True,
    ) -> None:
        """`stores`: whether prefill and decode have a store beside."""
        self.now = 0.0
        self.met = True
        self.link_is_verified = True
        self.verify = verify
        self.num_tokens = num_tokens
        self.local = local_tokens
        self.prefill_stores = stores[0]
        self.network: list[tuple[str, HandoffMessage]] = []
        self.sent: list[tuple[str, HandoffMessage]] = []
        self.source, self.target = Blocks(P_BLOCK, 1), Blocks(D_BLOCK, 2)
        self.reads = Reads(self.source, self.target)
        self.p_reports, self.d_reports = DirectReports(self._clock), DirectReports(self._clock)
        self.prefill = GivenPrompts(
            SETTINGS,
            self.p_reports,
            self._send,
            self._clock,
            block_size=P_BLOCK,
            checksums=HostChecksums(self.source.bytes, self.source.geometry) if verify else None,
            stores=stores[0],
        )
        self.decode = TakenPrompts(
            SETTINGS,
            self.d_reports,
            self._send,
            self.reads,
            self._clock,
            knows=lambda _: self.met,
            granule=lambda _: max(P_BLOCK, D_BLOCK),
            source_block=lambda _: P_BLOCK if self.link_is_verified else 0,
            checksums=HostChecksums(self.target.bytes, self.target.geometry) if verify else None,
            stores=stores[1],
        )
        rng = np.random.default_rng(3)
        self.kv = rng.integers(0, 256, (num_tokens, 2, 1, 2, ATOM), np.uint8)
        self.p_blocks = self.source.take(num_tokens)
        self.d_blocks: list[int] = []
        self.computed = 0
        self.state_p, self.state_d = "running", "waiting"
        self.received = self.left_to_store = self.storing = False
        self.broken = False
        if is_offered:
            self.offer()

    def offer(self) -> None:
        """Decode's engine hears of the request."""
        self.decode.offer(
            TakenPrompt(request_id="r", epoch=1, peer=PEER, num_tokens=self.num_tokens, ttl_s=30)
        )

    def _send(self, peer: str, message: HandoffMessage) -> None:
        assert (peer == OURS) == (message.kind in TO_DECODE)
        self.network.append((peer, HandoffMessage.decode(message.encode())))
        self.sent.append(self.network[-1])

    def _clock(self) -> float:
        return self.now

    # --- what may happen

    def step(self, count: int) -> None:
        """Prefill computes some more; the last step samples and hands over."""
        if self.state_p != "running":
            return
        self.prefill.begin(GivenPrompt(request_id="r", epoch=1, peer=OURS, kv_namespace="n"))
        end = min(self.num_tokens, self.computed + count)
        for position in range(self.computed, end):
            self.source.at(self.p_blocks, position)[:] = self.kv[position]
        self.computed = end
        if end < self.num_tokens:
            self.prefill.computed("r", end, self.p_blocks)
        else:
            self.state_p = "handed off"
            self.prefill.done("r", end, self.p_blocks, 77, min(3, end))

    def deliver(self, index: int, *, lose: bool = False, double: bool = False) -> None:
        if not self.network:
            return
        at = index % len(self.network)
        peer, message = self.network[at]
        if not double:
            del self.network[at]
        if lose:
            return
        (self.prefill if peer == PEER else self.decode).take(
            OURS if peer == PEER else PEER, message
        )

    def read(self, index: int, how: str) -> None:
        if not self.reads.open:
            return
        read_id = sorted(self.reads.open)[index % len(self.reads.open)]
        if how == "hang":
            if read_id not in self.reads.hung:
                self.reads.hung.add(read_id)
                self.reads.end(read_id, ReadState.QUARANTINED)
            return
        late = read_id in self.reads.hung
        if how == "read":
            self.reads.copy(read_id)
        if how == "corrupt":
            how = "fail" if late or not self.verify else how
        if how == "corrupt":
            self.reads.copy(read_id)
            self.target.at(self.d_blocks, self.reads.open[read_id].end_token - 1)[0, 0, 0, 0] ^= 1
        self.reads.end(read_id, ReadState.FAILED if late or how == "fail" else ReadState.DONE)

    def preempt(self) -> None:
        if self.state_p == "running" and self.computed:
            self.state_p = "preempted"
            self._drop_prefill()
            self.prefill.preempted("r")

    def begin_reading(self) -> None:
        """Prefill computes, and decode hears of it until it reads."""
        self.run("step", 8)
        while self.network and not self.reads.open:
            self.run("deliver", 0)

    def end_storing(self) -> None:
        """The tail is in the store, or will not be."""
        if self.storing:
            self.storing = False
            self.p_reports.left("r")

    def release_prefill(self) -> None:
        if self.state_p == "handed off":
            self.prefill.released("r")
        elif self.state_p in ("running", "preempted"):
            self._drop_prefill()
            self.state_p = "ended"
            self.prefill.released("r")

    def end_decode(self) -> None:
        if self.state_d == "ended":
            return
        if self.state_d in ("loading",):
            self.state_d = "quarantined"
        else:
            self._drop_decode()
            self.state_d = "ended"
        self.decode.released("r")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.prefill.tick()
        self.decode.tick()
        for side in (self.prefill, self.decode):
            due_s = side.next_at_s()
            assert due_s is None or due_s > self.now, "nothing is left to do now"

    # --- schedulers

    def settle(self) -> None:
        """What both schedulers do between steps."""
        for result in self.reads.results:
            self.decode.read_ended(result)
        self.reads.results.clear()
        self._settle_prefill()
        self._settle_decode()

    def _settle_prefill(self) -> None:
        if self.p_reports.take_leaving():
            assert self.prefill_stores
            assert self.state_p == "handed off"
            self.storing = True
        output = self.p_reports.take()
        if "r" in output.finished_sending:
            assert self.state_p == "handed off", "blocks come back once"
            assert not self.storing, "nobody copies what is free"
            if "r" in output.commits:
                assert self.received or self.state_d != "running"
            self._drop_prefill()
            self.state_p = "ended"

    def _settle_decode(self) -> None:
        if self.state_d == "waiting" and self.d_reports.is_announced("r"):
            self.state_d = "loading"
            self.d_blocks = self.target.take(self.num_tokens + 1)
            for position in range(self.local):
                self.target.at(self.d_blocks, position)[:] = self.kv[position]
            self.decode.reserved("r", self.local, self.d_blocks)
        output = self.d_reports.take()
        if "r" in output.left_to_store and self.state_d in ("waiting", "loading"):
            assert output.left_to_store["r"].token_id == 77
            assert not self.reads.open, "nothing writes blocks that are free"
            self._drop_decode()
            self.left_to_store, self.state_d = True, "ended"
        elif "r" in output.finished_recving:
            if self.state_d == "loading":
                assert output.handed_over["r"].token_id == 77
                self._check_kv()
                self.received, self.state_d = True, "running"
            elif self.state_d == "quarantined":
                assert not self.reads.open, "nothing writes blocks that are free"
                self._drop_decode()
                self.state_d = "ended"
        if "r" in output.failed_handoffs and self.state_d in ("waiting", "loading"):
            self.end_decode()

    def _check_kv(self) -> None:
        for position in range(self.num_tokens):
            np.testing.assert_array_equal(
                self.target.at(self.d_blocks, position), self.kv[position]
            )

    def _drop_prefill(self) -> None:
        self.source.give_back(self.p_blocks)
        self.p_blocks = []

    def _drop_decode(self) -> None:
        self.target.give_back(self.d_blocks)
        self.d_blocks = []

    # --- ends

    def run(self, kind: str, number: int) -> None:
        match kind:
            case "go":
                self.step(1 + number % 9)
                for _ in range(len(self.network)):
                    self.deliver(0)
            case "step":
                self.step(1 + number % 9)
            case "deliver" | "lose" | "double":
                self.deliver(number, lose=kind == "lose", double=kind == "double")
            case "read" | "fail" | "hang" | "corrupt":
                self.read(number, kind)
            case "time":
                self.pass_time(0.5 + number % 8)
            case "preempt":
                self.preempt()
            case "release":
                self.release_prefill()
            case "end":
                self.end_decode()
            case "stored":
                self.end_storing()
            case "gone":
                self.decode.peer_gone(PEER, "gone")
        self.settle()

    def quiet(self) -> None:
        """Nothing goes wrong any more: prefill computes, all arrives, time passes."""
        for _ in range(300):
            self.run("step", 5)
            while self.network:
                self.run("deliver", 0)
            for _ in list(self.reads.open):
                self.run("read", 0)
            self.run("stored", 0)
            self.run("time", 0)
        if self.state_p == "preempted":
            self.release_prefill()
        if self.state_d == "running":
            self.end_decode()
        for _ in range(60):
            self.run("time", 2)

    def check_end(self) -> None:
        assert (self.state_p, self.state_d) == ("ended", "ended")
        assert sorted(self.source.free) == sorted(self.target.free) == list(range(NUM_BLOCKS))
        assert len(self.decode) == self.prefill.num_held == 0
        assert self.decode.next_at_s() is None
        assert self.prefill.next_at_s() is None
        assert not self.reads.open
        assert not self.d_reports.is_announced("r")
        assert not self.d_reports.num_expected


MOVES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 31)), min_size=5, max_size=60)


@settings(max_examples=400, deadline=None)
@given(
    moves=MOVES,
    num_tokens=st.integers(1, 40),
    local=st.integers(0, 4),
    verify=st.booleans(),
    stores=st.sampled_from([(False, False), (True, True), (True, False)]),
)
def test_any_schedule_ends_with_the_right_kv_or_none_and_no_block_lost(
    moves: list[tuple[str, int]],
    num_tokens: int,
    local: int,
    verify: bool,
    stores: tuple[bool, bool],
) -> None:
    local_tokens = min(local * D_BLOCK, (num_tokens - 1) // D_BLOCK * D_BLOCK)
    world = World(num_tokens, local_tokens, verify=verify, stores=stores)
    for kind, number in moves:
        world.run(kind, number)
    world.quiet()
    world.check_end()


@pytest.mark.parametrize("num_tokens", [1, 8, 13, 40])
@pytest.mark.parametrize("chunk", [1, 4, 6, 40])
def test_without_bad_luck_the_kv_arrives(num_tokens: int, chunk: int) -> None:
    world = World(num_tokens, 0)
    while world.state_p == "running":
        world.run("step", chunk - 1)
        while world.network:
            world.run("deliver", 0)
        while world.reads.open:
            world.run("read", 0)
    # from COMMIT on the KV is to be expected, until it is there
    assert world.d_reports.is_expecting
    while world.network:
        world.run("deliver", 0)
    assert world.received
    assert not world.d_reports.is_expecting
    assert world.prefill.num_valid == 1
    world.quiet()
    world.check_end()


@pytest.mark.parametrize("chunk", [4, 40])
def test_what_prefill_says_before_decode_knows_the_request_is_not_lost(chunk: int) -> None:
    """Nothing has to be said again, and nothing is without a rule."""
    world = World(40, 0, is_offered=False)
    while world.state_p == "running":
        world.run("step", chunk - 1)
        while world.network:
            world.run("deliver", 0)
    world.offer()
    world.settle()
    while not world.received:
        assert world.network or world.reads.open, "somebody waits for a repetition"
        while world.reads.open:
            world.run("read", 0)
        while world.network:
            world.run("deliver", 0)
    assert not world.decode.ignored
    assert not world.prefill.ignored
    world.quiet()
    world.check_end()


def test_what_is_said_of_a_request_that_never_comes_is_forgotten() -> None:
    world = World(40, 0, is_offered=False)
    world.run("step", 3)
    while world.network:
        world.run("deliver", 0)
    world.now += 6.0
    world.decode.tick()
    assert world.decode.ignored.total() == 1
    world.offer()
    world.settle()
    assert not world.d_reports.is_announced("r")


def test_both_sides_count_what_was_read_and_not_what_decode_had() -> None:
    world = World(40, 2 * D_BLOCK)
    world.run("step", 39)
    world.quiet()
    assert world.received
    assert world.decode.num_tokens == world.prefill.num_tokens == 40 - 2 * D_BLOCK


def test_a_commit_is_expected_once_prompts_like_it_have_come() -> None:
    """From a little before its time on: then no step is planned ahead that it would miss."""
    world = World(40, 0)
    world.now = 100.0

    def begin(request_id: str) -> None:
        if request_id != "r":
            world.decode.offer(
                TakenPrompt(request_id=request_id, epoch=1, peer=PEER, num_tokens=40, ttl_s=30)
            )
        world.decode.take(PEER, said(request_id, Event.PREFILL_STARTED, 1))
        world.decode.reserved(request_id, 0, world.d_blocks or world.target.take(40))

    def said(request_id: str, kind: Event, number: int, **rest: Any) -> HandoffMessage:
        return HandoffMessage(kind=kind, request_id=request_id, epoch=1, number=number, **rest)

    def at(seconds: float) -> bool:
        world.now = seconds
        return world.d_reports.is_expecting

    begin("r")
    assert not at(100.1)  # nothing is known of its pace
    commit = {"num_tokens": 40, "token_id": 7, "block_ids": world.p_blocks}
    world.decode.take(PEER, said("r", Event.COMMIT, 2, **commit))
    assert at(100.1)
    assert not at(100.2)  # it is slow: steps go on as ever
    world.decode.peer_gone(PEER, "it went")
    begin("s")
    assert [at(100.2 + seconds) for seconds in (0.05, 0.09, 0.12, 0.2)] == [
        False,
        True,
        True,
        False,
    ]
    world.decode.take(PEER, said("s", Event.COMMIT, 2, **commit))
    assert at(100.401)
    world.decode.peer_gone(PEER, "it went")
    assert not world.d_reports.num_expected


def test_a_chunk_is_read_while_the_next_is_computed() -> None:
    world = World(40, 0)
    world.run("step", 7)
    world.run("deliver", 0)
    world.run("deliver", 0)
    while world.network:
        world.run("deliver", 0)
    assert [order.end_token for order in world.reads.open.values()] == [8]
    assert world.state_p == "running"


@pytest.mark.parametrize("how", ["release", "preempt", "lease"])
def test_kv_that_is_read_after_its_blocks_were_given_away_is_not_used(how: str) -> None:
    world = World(20, 0, verify=False)
    for _ in range(2 if how == "preempt" else 3):
        world.run("go", 8)
    if how == "lease":
        # the reader is there, but its messages do not arrive
        world.now += SETTINGS.lease_s
        world.prefill.tick()
        world.settle()
    else:
        world.run(how, 0)
    world.network.clear()
    assert not world.p_blocks
    while world.reads.open:
        world.run("read", 0)
    world.quiet()
    assert world.state_d == "ended"
    assert not world.received
    world.check_end()


@pytest.mark.parametrize(("met", "limit_s"), [(True, 30.0), (False, SETTINGS.silence_s)])
def test_a_prefill_worker_that_cannot_be_heard_is_not_waited_for(met: bool, limit_s: float) -> None:
    """It was gone before the request came: nobody will say so again."""
    world = World(20, 0)
    world.met = met
    world.run("time", limit_s - 0.01)
    assert world.state_d == "waiting"
    world.run("time", 0.02)
    world.quiet()
    assert world.state_d == "ended"
    world.check_end()


@pytest.mark.parametrize("stores", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("reserved", [True, False], ids=["reading", "without room"])
def test_prefill_leaves_to_the_store_what_no_reader_has_room_for(
    stores: tuple[bool, bool], reserved: bool
) -> None:
    """As far as prefill knows: a reader whose ACK was lost gives up what it reads."""
    world = World(20, 0, stores=stores)
    world.run("step", 8)
    world.run("step", 8)
    world.run("step", 8)
    if reserved:
        while world.network and not world.reads.open:
            world.run("deliver", 0)
        assert world.reads.open
    world.network.clear()
    world.run("time", 5)  # hold_s, and a little
    assert world.storing == stores[0]
    world.network.clear()
    world.run("stored", 0)
    world.run("time", 0)
    assert (world.state_p == "ended") == stores[0]
    while world.network:
        world.run("deliver", 0)
    if reserved and stores[0]:
        assert world.state_d in ("loading", "quarantined")
        while world.reads.open:
            world.run("read", 0)
    assert world.left_to_store == all(stores)
    assert world.prefill.num_stored == stores[0]
    world.quiet()
    world.check_end()


def computed_and_left() -> World:
    """A prompt for which decode has no room, of which the tail is on its way to the store."""
    world = World(20, 0, stores=(True, True))
    for _ in range(3):
        world.run("step", 8)
    world.network.clear()
    world.run("time", 5)
    assert world.storing
    assert not [m for _, m in world.network if m.kind is Event.STORED]
    return world


def test_the_reader_is_sent_to_the_store_once_the_tail_is_there() -> None:
    world = computed_and_left()
    world.network.clear()
    world.run("stored", 0)
    world.run("time", 0)
    assert world.network[0][1].kind is Event.STORED
    assert world.state_p == "ended"
    world.quiet()
    assert world.left_to_store
    world.check_end()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_prompt_whose_reader_was_silent_all_the_while_goes_to_the_store_with_its_tail(
    in_time: bool,
) -> None:
    world = World(20, 0, stores=(True, True))
    world.run("step", 8)
    world.run("step", 3)
    world.network.clear()
    for _ in range(3):
        world.run("time", 7)
    world.run("step", 8)
    assert world.storing
    world.network.clear()
    if in_time:
        world.run("stored", 0)
        world.run("time", 0)
    else:
        world.run("time", 7)
        assert not world.network
        world.run("time", 7)
    assert [m.kind for _, m in world.network] == [Event.STORED]
    assert bool(world.prefill.num_held) != in_time
    world.quiet()
    assert world.prefill.num_stored == 1
    world.check_end()


def test_a_tail_that_takes_too_long_to_be_stored_is_not_waited_for_but_its_blocks_are() -> None:
    world = computed_and_left()
    world.run("time", 7)
    assert Event.STORED in [m.kind for _, m in world.network]
    assert world.state_p == "handed off"
    assert world.prefill.num_held
    world.run("stored", 0)
    world.run("time", 0)
    assert world.state_p == "ended"
    world.quiet()
    world.check_end()


def test_a_reader_that_finds_room_while_the_tail_is_stored_reads_directly() -> None:
    world = computed_and_left()
    for _ in range(30):
        while world.network:
            world.run("deliver", 0)
        while world.reads.open:
            world.run("read", 0)
        world.run("time", 0)
    assert world.received
    assert world.prefill.num_valid
    assert not world.prefill.num_stored
    assert world.state_p == "handed off", "its blocks are still copied"
    world.quiet()
    world.check_end()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_read_that_failed_is_tried_once_more(failures: int) -> None:
    world = World(20, 0)
    for _ in range(3):
        world.run("step", 8)
    while world.network and not world.reads.open:
        world.run("deliver", 0)
    for _ in range(failures):
        assert world.reads.open
        world.run("fail", 0)
    world.quiet()
    assert world.received == (failures == 1)
    world.check_end()


def test_a_lost_verdict_is_asked_for_again() -> None:
    world = World(20, 0)
    for _ in range(3):
        world.run("go", 8)
    while world.reads.open:
        world.run("read", 0)
    assert [message.kind for _, message in world.network][-1] is Event.READ_DONE
    for _ in range(3):
        world.network.clear()
        world.run("time", 1)
    while world.network:
        world.run("deliver", 0)
    assert world.received
    world.quiet()
    world.check_end()


def test_a_reader_that_did_not_hear_of_the_end_learns_of_it() -> None:
    """What prefill said of it came before decode had anything to give up, or not at all."""
    world = World(40, 0)
    world.run("step", 7)
    world.deliver(0)  # announced, but nothing is reserved yet
    world.preempt()
    while world.network:
        world.deliver(0)
    world.settle()
    assert world.state_d == "loading"
    world.run("time", 0)
    while world.network:
        world.run("deliver", 0)
    assert world.now < SETTINGS.silence_s
    assert world.state_d == "ended" or world.reads.open
    world.quiet()
    world.check_end()


def test_an_answer_that_ends_with_prefills_token_is_no_failed_handoff() -> None:
    """Its router says so to decode: what prefill says is no reason to look for another attempt."""
    world = World(20, 0)
    world.begin_reading()
    world.release_prefill()
    for _ in range(2):
        world.run("time", 1)  # decode shows that it is there, and is told
        while world.network:
            world.run("deliver", 0)
    assert world.prefill.num_gone == 1
    assert world.state_d == "loading"
    world.end_decode()
    while world.reads.open:
        world.run("read", 0)
    world.quiet()
    assert not world.decode.failures
    world.check_end()


def test_decode_does_not_wait_for_ever_for_the_word_of_a_router_that_says_nothing() -> None:
    world = World(20, 0)
    world.begin_reading()
    world.release_prefill()
    world.quiet()
    assert world.state_d == "ended"
    assert world.decode.failures.total() == 1
    world.check_end()


def test_a_lease_that_ends_under_way_lets_prefill_go_on_and_holds_nothing_after() -> None:
    world = World(20, 0)
    world.run("step", 8)
    for _ in range(4):
        world.network.clear()
        world.run("time", 7)
    world.run("step", 8)
    assert world.state_p == "running"
    world.run("step", 8)
    assert world.state_p == "ended"
    assert world.prefill.num_gone == 1
    world.quiet()
    world.check_end()


def test_checksums_that_decode_does_not_compare_are_not_taken() -> None:
    """Over a link of GPUs; what decode says with its first word holds for the chunks after it."""
    world = World(20, 0)
    world.link_is_verified = False
    world.begin_reading()
    said = [message.verifies for peer, message in world.sent if peer == PEER]
    assert said
    assert not any(said)
    while world.network:
        world.run("deliver", 0)
    while world.state_p == "running":
        world.run("step", 20)
    while world.network or world.reads.open:
        world.run("deliver", 0)
        world.run("read", 0)
    [commit] = {m.number: m for _, m in world.sent if m.kind is Event.COMMIT}.values()
    assert commit.checksums == []
    assert world.received


def test_corrupt_kv_is_not_used() -> None:
    world = World(20, 0)
    world.run("step", 8)
    world.run("step", 8)
    world.run("step", 8)
    while world.network:
        world.run("deliver", 0)
    world.run("corrupt", 0)
    while world.reads.open:
        world.run("read", 0)
    assert world.decode.num_corrupt == 1
    assert not world.received
    world.quiet()
    world.check_end()


@pytest.mark.parametrize("kind", [Event.COMMIT, Event.STORED])
@pytest.mark.parametrize(
    "wrong", [{"token_id": -1}, {"num_cached_tokens": 21}], ids=["no token", "more than there is"]
)
def test_the_end_of_another_prompt_is_not_believed(kind: Event, wrong: dict[str, int]) -> None:
    world = World(20, 0, stores=(True, True))
    world.run("step", 8)
    world.network.clear()
    said = {"num_tokens": 20, "block_ids": list(range(5)), "token_id": 7, **wrong}
    world.decode.take(PEER, HandoffMessage(kind=kind, request_id="r", epoch=1, number=9, **said))
    world.settle()
    assert world.state_d == "ended"
    assert world.decode.failures == {"prefill announced what is not this prompt": 1}
    world.run("release", 0)
    world.quiet()
    world.check_end()


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(TransferError, match="cannot be read"):
        HandoffMessage.decode(b"\x81\x01")
    nested = b"\x81\xa2zz" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(TransferError, match="cannot be read"):
        HandoffMessage.decode(nested)
    good = HandoffMessage(kind=Event.ACK, request_id="name", epoch=1).encode()
    with pytest.raises(TransferError, match="cannot be read"):
        HandoffMessage.decode(good.replace(b"name", b"\xff\xfe\xfd\xfc"))
    ticket = HandoffMessage(kind=Event.TICKET, request_id="r", epoch=1)
    with pytest.raises(TransferError, match="no engine is to send"):
        HandoffMessage.decode(ticket.encode())
    commit = HandoffMessage(kind=Event.COMMIT, request_id="r", epoch=1, token_id=1 << 31)
    with pytest.raises(TransferError, match="cannot be read"):
        HandoffMessage.decode(commit.encode())
