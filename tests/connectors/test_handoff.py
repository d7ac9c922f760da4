"""Several hand-offs at once share decode's blocks; whatever happens, each ends with its own KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.connectors.explore_moves import Moves
from diptych.connectors.explore_world import Edge, Violation, World, is_over
from diptych.connectors.handoff import (
    RULES,
    Age,
    Event,
    Row,
    Rules,
    State,
    markdown,
    table_of,
)
from diptych.connectors.handoff_decode import step_decode
from diptych.connectors.handoff_machines import (
    DECODE,
    Decode,
    Message,
    Prefill,
    Router,
    Shape,
)
from diptych.connectors.handoff_prefill import step_prefill
from diptych.connectors.handoff_router import step_router
from tests.connectors.planted_bugs import no_quarantine

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/handoff.md"
SOME_STEPS, MANY_STEPS = 60, 3000


@dataclass
class Pool:
    """Decode's physical blocks; a block holds who wrote it last."""

    free: list[int]
    content: dict[int, tuple[int, int] | None] = field(default_factory=dict)


@dataclass
class HandOff:
    """One hand-off among others: its world, and which physical blocks its reads write to."""

    number: int
    moves: Moves
    world: World
    pool: Pool
    shape: Shape
    blocks: dict[int, int] = field(default_factory=dict)
    quarantined: dict[int, list[int]] = field(default_factory=dict)

    def take(self, edge: Edge) -> None:
        """Follow the machine's edge with real blocks."""
        before, after = self.world.decode, edge.world.decode
        self.world = edge.world
        moved_on = after.epoch != before.epoch or not after.held
        newly_stored = after.state is State.STORE_READING is not before.state
        if self.blocks and (moved_on or newly_stored):
            self._give_up(after.quarantine & before.reading)
        if after.held and not self.blocks:
            self.blocks = {bit: self.pool.free.pop() for bit in _bits(self.shape.blocks)}
        for bit in _bits(before.quarantine & ~after.quarantine):
            self._late_write(bit)
        for bit in _bits(after.have & ~(before.have if not moved_on else 0)):
            self.pool.content[self.blocks[bit]] = (self.number, bit)
        if after.state is State.DECODING:
            for bit, block in self.blocks.items():
                assert self.pool.content[block] == (self.number, bit), "another's bytes"

    def _give_up(self, still_writing: int) -> None:
        for bit, block in self.blocks.items():
            if bit & still_writing:
                self.quarantined.setdefault(bit, []).append(block)
            else:
                self.pool.free.append(block)
        self.blocks = {}

    def _late_write(self, bit: int) -> None:
        """A given-up read ends: its last bytes land, then its block is free."""
        for block in self.quarantined.pop(bit, []):
            assert block not in self.pool.free
            self.pool.content[block] = None
            self.pool.free.append(block)


def _bits(mask: int) -> list[int]:
    return [1 << n for n in range(mask.bit_length()) if mask >> n & 1]


def draw_shape(random: Random) -> Shape:
    ends = sorted(random.sample(range(1, 7), random.randint(1, 3)))
    chunks = (0, *((1 << end) - 1 for end in ends))
    hits = (1 << random.randint(0, ends[0])) - 1
    return Shape(chunks, hits, random.randint(1, 6), random.randint(1, 4))


def play(seed: int, rules: Rules = RULES) -> list[HandOff]:
    """Run several hand-offs with bad luck, then without, to their end."""
    random = Random(seed)
    pool = Pool(list(range(400)))
    games = []
    for number in range(random.randint(1, 4)):
        shape = draw_shape(random)
        moves = Moves(rules, shape)
        games.append(HandOff(number, moves, moves.start(random.randint(0, 8)), pool, shape))
    for turn in range(MANY_STEPS):
        game = random.choice(games)
        lucky = turn > SOME_STEPS * len(games)
        edges = list(game.moves.edges(game.world))
        faulty = not lucky and random.random() < 0.2
        chosen = [e for e in edges if e.is_fault == faulty]
        if chosen:
            game.take(random.choice(chosen))
        if lucky and all(is_over(game.world) for game in games):
            break
    return games


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_hand_offs_share_blocks_and_each_ends_with_its_own_bytes(seed: int) -> None:
    games = play(seed)
    assert all(is_over(game.world) for game in games)
    assert len(games[0].pool.free) == 400
    for game in games:
        assert game.world.router.delivered <= game.shape.num_tokens


def test_without_quarantine_the_same_play_finds_the_fault() -> None:
    found = 0
    for seed in range(40):
        try:
            play(seed, no_quarantine())
        except (Violation, AssertionError):
            found += 1
    assert found > 5


def test_two_rules_for_one_case_are_refused() -> None:
    row = Row((State.OFFERED,), Event.CHUNK, (Age.CURRENT,), None, ())
    with pytest.raises(ValueError, match="two rules"):
        table_of([row, row])


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_no_message_in_any_state_is_an_error(event: Event, epoch: int) -> None:
    shape = Shape((0, 1, 3), 1, 3, 2)
    for state in State:
        message = Message(event, DECODE, epoch, number=2, blocks=1)
        decode = Decode(state, epoch=2, held=True, announced=1, reading=1)
        assert step_decode(RULES, shape, decode, event, message, 1).machine.epoch in (0, 1, 2, 3)
        prefill = Prefill(state, epoch=2, number=2, leased=1)
        assert step_prefill(RULES, shape, prefill, event, message).machine.epoch in (0, 1, 2, 3)


def test_the_verdict_is_the_same_however_often_it_is_asked() -> None:
    shape = Shape((0, 1), 1, 3, 2)
    asked = Message(Event.READ_DONE, "prefill", 2)
    holding = Prefill(State.HOLDING, epoch=2, number=2, leased=1)
    first = step_prefill(RULES, shape, holding, Event.READ_DONE, asked)
    assert [m.kind for m in first.messages] == [Event.VALID]
    assert isinstance(first.machine, Prefill)
    again = step_prefill(RULES, shape, first.machine, Event.READ_DONE, asked)
    assert again.messages == first.messages
    release = Message(Event.RELEASE, "prefill", 2)
    released = step_prefill(RULES, shape, first.machine, Event.RELEASE, release).machine
    assert isinstance(released, Prefill)
    assert step_prefill(RULES, shape, released, asked.kind, asked).messages == first.messages
    late = step_prefill(RULES, shape, first.machine, Event.LEASE_END)
    assert late.machine == first.machine


def test_a_read_done_that_nobody_knows_is_answered_gone() -> None:
    asked = Message(Event.READ_DONE, "prefill", 7)
    outcome = step_prefill(RULES, Shape((0, 1), 1, 3, 2), Prefill(), Event.READ_DONE, asked)
    assert [(m.kind, m.epoch) for m in outcome.messages] == [(Event.GONE, 7)]


def test_a_ticket_for_an_earlier_life_of_the_worker_is_refused() -> None:
    shape = Shape((0, 1), 1, 3, 3)
    offer = Message(Event.OFFER, DECODE, epoch=1)
    assert step_decode(RULES, shape, Decode(), offer.kind, offer).machine.state is State.OFFERED
    restarted = Decode(incarnation=1)
    assert step_decode(RULES, shape, restarted, offer.kind, offer).machine == restarted


def test_a_restart_concerns_only_the_attempt_that_uses_the_worker() -> None:
    shape = Shape((0, 1), 1, 3, 3)
    news = Message(Event.PREFILL_RESTARTED, "router", incarnation=1)
    for router, epoch in (
        (Router(), 2),
        (Router(local=True), 1),
        (Router(prefill_incarnation=1), 1),
        (Router(State.STREAMING), 1),
    ):
        after = step_router(RULES, shape, router, news.kind, news, incarnations=(1, 0)).machine
        assert after.epoch == epoch


def test_the_document_shows_the_rules_as_they_are() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert markdown() in text, "run: python -m diptych.connectors.handoff > tables, and paste them"
