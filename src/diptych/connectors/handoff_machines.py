"""Values of the hand-off's machines, and one turn of one of them by its table.

Blocks are bits of an integer. A machine is a value; an event gives the next value and what leaves
it (`handoff_decode`, `handoff_prefill`, `handoff_router`), without time, I/O or randomness. Whoever
drives a machine owns the clock, the network and the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from diptych.connectors.handoff import Action, Age, Event, State, Table

ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
TICKETS = (Event.TICKET, Event.OFFER, Event.RECOMPUTE)
ACK_STORED = 1 << 16  # number of an ACK of STORED: above all announcements


class Message(NamedTuple):
    """`number` is an announcement's number, the tokens a ticket brings, or a token's position.

    `start` is the position of the first token that decode samples, in COMMIT and STORED.
    `incarnation` is the one of the worker that a ticket is for.
    """

    kind: Event
    target: str
    epoch: int = 0
    number: int = 0
    blocks: int = 0
    start: int = 0
    incarnation: int = 0
    source: str = ""


class Shape(NamedTuple):
    """What stays fixed over a hand-off.

    `chunks[n]` are the blocks that announcement n + 1 has in all; the last one is the COMMIT.
    `hits` are those that prefill found in its prefix cache.
    """

    chunks: tuple[int, ...]
    hits: int
    num_tokens: int
    max_epoch: int

    @property
    def blocks(self) -> int:
        return self.chunks[-1]


class Decode(NamedTuple):
    """Decode's part of one hand-off, and its quarantine.

    `number` is the last announcement, `announced` its blocks; `reading` are reads that may still
    write, `quarantine` reads of attempts that were given up; `held` whether blocks are reserved.
    """

    state: State = State.IDLE
    epoch: int = 0
    number: int = 0
    announced: int = 0
    committed: bool = False
    have: int = 0
    reading: int = 0
    quarantine: int = 0
    held: bool = False
    position: int = 0
    incarnation: int = 0


class Prefill(NamedTuple):
    """Prefill's part: `given` tokens came with the ticket, the next one is sampled here."""

    state: State = State.IDLE
    epoch: int = 0
    number: int = 0
    acked: int = 0
    leased: int = 0
    lapsed: bool = False
    verdict: Event | None = None
    given: int = 0
    incarnation: int = 0


class Router(NamedTuple):
    """The router's part: `delivered` tokens are with the client, `early` wait for those before."""

    state: State = State.ISSUED
    epoch: int = 1
    given: int = 0
    delivered: int = 0
    early: int = 0
    local: bool = False
    released: tuple[str, ...] = ()
    prefill_incarnation: int = 0
    decode_incarnation: int = 0


M = TypeVar("M", Decode, Prefill, Router)


class Outcome(NamedTuple):
    """What an event led to.

    `sampled` is a position sampled here, `delivered` are those that reached the client, `counted`
    is the number of events without a rule or with nothing to do.
    """

    machine: Decode | Prefill | Router
    messages: tuple[Message, ...] = ()
    sampled: int | None = None
    delivered: tuple[int, ...] = ()
    counted: int = 0


class Turn:
    """One event under way: the machine as it becomes, and what leaves it."""

    def __init__(self, shape: Shape, message: Message, block: int, retry_local: bool) -> None:
        self.shape = shape
        self.message = message
        self.block = block
        self.retry_local = retry_local
        self.messages: list[Message] = []
        self.sampled: int | None = None
        self.delivered: list[int] = []
        self.counted = 0

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def outcome(self, machine: Decode | Prefill | Router) -> Outcome:
        return Outcome(
            machine, tuple(self.messages), self.sampled, tuple(self.delivered), self.counted
        )


def apply(
    table: Table,
    machine: M,
    event: Event,
    age: Age,
    turn: Turn,
    act: Callable[[Action, M, Turn], M],
) -> M:
    rule = table.get((machine.state, event, age))
    if rule is None:
        turn.counted += 1
        return machine
    for action in rule.do:
        machine = act(action, machine, turn)
    return machine if rule.then is None else machine._replace(state=rule.then)


def age_of(own: int, other: int) -> Age:
    if other == own:
        return Age.CURRENT
    return Age.NEWER if other > own else Age.STALE


def ticket_age(machine: Decode | Prefill, message: Message) -> Age:
    """A ticket for another incarnation of this worker is as stale as one of a lower epoch."""
    if message.kind in TICKETS and message.incarnation != machine.incarnation:
        return Age.STALE
    return age_of(machine.epoch, message.epoch)
