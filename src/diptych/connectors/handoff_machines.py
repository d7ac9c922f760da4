"""The rules of `handoff` applied to values: three small machines without time, I/O or randomness.

Blocks are bits of an integer. A machine is a value; an event gives the next value and what leaves
it. Whoever drives one owns the clock, the network and the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from diptych.connectors.handoff import ANNOUNCEMENTS, Action, Age, Event, Rules, State, Table

TICKETS = (Event.TICKET, Event.OFFER, Event.RECOMPUTE)
ACK_STORED = 1 << 16  # number of an ACK of STORED: above all announcements


ROUTER, PREFILL, DECODE = "router", "prefill", "decode"


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


class _Turn:
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

    def outcome(self, machine: Decode | Prefill | Router) -> Outcome:
        return Outcome(
            machine, tuple(self.messages), self.sampled, tuple(self.delivered), self.counted
        )


def step_decode(
    rules: Rules,
    shape: Shape,
    machine: Decode,
    event: Event,
    message: Message | None = None,
    block: int = 0,
) -> Outcome:
    """Decode after `event`; a message comes with its kind as the event (or NO_ROOM)."""
    turn = _Turn(shape, message or Message(event, DECODE, machine.epoch), block, False)
    age = _ticket_age(machine, turn.message) if message else Age.CURRENT
    machine = _apply(rules.decode, machine, event, age, turn, _decode_action)
    while (own := _decode_raises(shape, machine)) is not None:
        machine = _apply(rules.decode, machine, own, Age.CURRENT, turn, _decode_action)
    return turn.outcome(machine)


def step_prefill(
    rules: Rules, shape: Shape, machine: Prefill, event: Event, message: Message | None = None
) -> Outcome:
    """Prefill after `event`."""
    turn = _Turn(shape, message or Message(event, PREFILL, machine.epoch), 0, False)
    age = _ticket_age(machine, turn.message) if message else Age.CURRENT
    machine = _apply(rules.prefill, machine, event, age, turn, _prefill_action)
    if machine.state is State.PREFILLING and machine.number == len(shape.chunks):
        done = Event.PROMPT_DONE_LAPSED if machine.lapsed else Event.PROMPT_DONE
        machine = _apply(rules.prefill, machine, done, Age.CURRENT, turn, _prefill_action)
    return turn.outcome(machine)


def step_router(
    rules: Rules,
    shape: Shape,
    machine: Router,
    event: Event,
    message: Message | None = None,
    *,
    retry_local: bool = False,
    incarnations: tuple[int, int] = (0, 0),
) -> Outcome:
    """The router after `event`. A retry goes to the workers' `incarnations` (prefill, decode), to
    decode alone if `retry_local`."""
    turn = _Turn(shape, message or Message(event, ROUTER, machine.epoch), 0, retry_local)
    age = _age(machine.epoch, turn.message.epoch) if message and message.epoch else Age.CURRENT
    if _is_old_news(machine, turn.message):
        return Outcome(machine, counted=1)
    if _is_retry(rules, machine, event, age):
        if machine.epoch == shape.max_epoch:
            event = Event.OUT_OF_ATTEMPTS
        machine = machine._replace(
            prefill_incarnation=incarnations[0], decode_incarnation=incarnations[1]
        )
    machine = _apply(rules.router, machine, event, age, turn, _router_action)
    if machine.delivered == shape.num_tokens and machine.state is not State.ENDED:
        machine = _apply(
            rules.router, machine, Event.ALL_DELIVERED, Age.CURRENT, turn, _router_action
        )
    if len(machine.released) == 2:
        machine = _apply(
            rules.router, machine, Event.BOTH_RELEASED, Age.CURRENT, turn, _router_action
        )
    return turn.outcome(machine)


def _apply(
    table: Table,
    machine: M,
    event: Event,
    age: Age,
    turn: _Turn,
    act: Callable[[Action, M, _Turn], M],
) -> M:
    rule = table.get((machine.state, event, age))
    if rule is None:
        turn.counted += 1
        return machine
    for action in rule.do:
        machine = act(action, machine, turn)
    return machine if rule.then is None else machine._replace(state=rule.then)


def _age(own: int, other: int) -> Age:
    if other == own:
        return Age.CURRENT
    return Age.NEWER if other > own else Age.STALE


def _ticket_age(machine: Decode | Prefill, message: Message) -> Age:
    """A ticket for another incarnation of this worker is as stale as one of a lower epoch."""
    if message.kind in TICKETS and message.incarnation != machine.incarnation:
        return Age.STALE
    return _age(machine.epoch, message.epoch)


def _is_old_news(machine: Router, message: Message) -> bool:
    """A restart that the current tickets know of, or that does not concern them."""
    if message.kind is Event.PREFILL_RESTARTED:
        return machine.local or message.incarnation == machine.prefill_incarnation
    if message.kind is Event.DECODE_RESTARTED:
        return message.incarnation == machine.decode_incarnation
    return False


def _is_retry(rules: Rules, machine: Router, event: Event, age: Age) -> bool:
    rule = rules.router.get((machine.state, event, age))
    return rule is not None and Action.NEXT_EPOCH in rule.do


def _decode_raises(shape: Shape, machine: Decode) -> Event | None:
    """The event that the machine's own values call for."""
    state = machine.state
    if state is State.RESERVED and (machine.reading or machine.have):
        return Event.READS_POSTED
    if state is State.READING and machine.committed and machine.have == machine.announced:
        return Event.ALL_READ
    if state is State.ABORTED and not machine.quarantine:
        return Event.QUARANTINE_EMPTY
    if state in (State.DECODING, State.LOCAL) and machine.position >= shape.num_tokens:
        return Event.LAST_TOKEN
    return None


def _decode_action(action: Action, m: Decode, turn: _Turn) -> Decode:
    message = turn.message
    match action:
        case Action.ADOPT:
            fresh = Decode(m.state, message.epoch, quarantine=m.quarantine)
            return fresh._replace(incarnation=m.incarnation, position=message.number)
        case Action.NOTE:
            if message.number <= m.number:
                return m
            m = m._replace(number=message.number, announced=m.announced | message.blocks)
            if message.kind in (Event.COMMIT, Event.STORED):
                m = m._replace(committed=True, position=message.start)
            return m
        case Action.RESERVE:
            return m._replace(held=True)
        case Action.POST_READS:
            return m._replace(reading=m.announced & ~m.have)
        case Action.POST_STORE_READS:
            return m._replace(reading=turn.shape.blocks)
        case Action.END_READ:
            return m._replace(reading=m.reading & ~turn.block)
        case Action.KEEP:
            return m._replace(have=m.have | turn.block)
        case Action.KEEP_ALL:
            return m._replace(have=turn.shape.blocks, reading=0)
        case Action.QUARANTINE:
            return m._replace(quarantine=m.quarantine | m.reading)
        case Action.UNQUARANTINE:
            return m._replace(quarantine=m.quarantine & ~turn.block)
        case Action.FREE:
            return m._replace(held=False, have=0, reading=0)
        case Action.EMIT_TOKEN:
            turn.sampled = m.position
            turn.messages.append(
                Message(Event.DECODE_TOKEN, ROUTER, m.epoch, m.position, source=DECODE)
            )
            return m._replace(position=m.position + 1)
        case Action.COUNT:
            turn.counted += 1
        case Action.ACK:
            number = ACK_STORED if message.kind is Event.STORED else m.number
            turn.messages.append(Message(Event.ACK, PREFILL, m.epoch, number, source=DECODE))
        case Action.SEND_READ_DONE:
            turn.messages.append(Message(Event.READ_DONE, PREFILL, m.epoch, source=DECODE))
        case Action.SEND_RENEW:
            turn.messages.append(Message(Event.RENEW, PREFILL, m.epoch, source=DECODE))
        case Action.REPORT:
            turn.messages.append(Message(Event.FAILED, ROUTER, m.epoch, source=DECODE))
        case Action.CONFIRM:
            turn.messages.append(Message(Event.RELEASED, ROUTER, message.epoch, source=DECODE))
        case _:
            raise ValueError(f"decode has no action {action}")
    return m


def _prefill_action(action: Action, m: Prefill, turn: _Turn) -> Prefill:
    message, shape = turn.message, turn.shape
    match action:
        case Action.ADOPT:
            if message.epoch == m.epoch:
                return m
            fresh = Prefill(m.state, message.epoch, incarnation=m.incarnation)
            return fresh._replace(given=message.number)
        case Action.ADOPT_HELD:
            m = m._replace(epoch=message.epoch, acked=0, lapsed=False, verdict=None)
            # what is sampled already is not sampled again
            return m if m.state is State.HOLDING else m._replace(given=message.number)
        case Action.COMPUTE:
            return m._replace(number=m.number + 1)
        case Action.LEASE_HITS:
            return m._replace(leased=m.leased | (shape.chunks[m.number - 1] & shape.hits))
        case Action.LEASE_OWN:
            return m._replace(leased=m.leased | (shape.chunks[m.number - 1] & ~shape.hits))
        case Action.ANNOUNCE:
            m = m._replace(number=max(1, m.number))
            if not m.lapsed and m.acked < m.number:
                turn.messages.append(_announcement(m, shape))
            return m
        case Action.SAMPLE:
            turn.sampled = m.given
            turn.messages.append(_prefill_token(m))
        case Action.RESEND_TOKEN:
            if message.number <= m.given:
                turn.messages.append(_prefill_token(m))
        case Action.NOTE_ACK:
            return m._replace(acked=max(m.acked, message.number))
        case Action.FORGET_ACKS:
            return m._replace(acked=0)
        case Action.LAPSE:
            return m._replace(lapsed=True)
        case Action.KEEP_VALID:
            return m._replace(verdict=Event.VALID)
        case Action.KEEP_GONE:
            return m._replace(verdict=m.verdict or Event.GONE)
        case Action.FREE:
            return m._replace(leased=0, number=0, acked=0, lapsed=False)
        case Action.ANSWER:
            verdict = m.verdict or Event.GONE
            turn.messages.append(Message(verdict, DECODE, m.epoch, source=PREFILL))
        case Action.ANSWER_GONE:
            turn.messages.append(Message(Event.GONE, DECODE, message.epoch, source=PREFILL))
        case Action.SEND_STORED:
            if m.acked < ACK_STORED:
                turn.messages.append(_stored(m, shape))
        case Action.SEND_REVOKE:
            turn.messages.append(Message(Event.REVOKE, DECODE, m.epoch, source=PREFILL))
        case Action.REPORT:
            turn.messages.append(Message(Event.FAILED, ROUTER, m.epoch, source=PREFILL))
        case Action.CONFIRM:
            turn.messages.append(Message(Event.RELEASED, ROUTER, message.epoch, source=PREFILL))
        case Action.COUNT:
            turn.counted += 1
        case Action.EXTEND_LEASE:
            pass  # the driver's timer
        case _:
            raise ValueError(f"prefill has no action {action}")
    return m


def _announcement(m: Prefill, shape: Shape) -> Message:
    last = m.number == len(shape.chunks)
    kind = ANNOUNCEMENTS[2 if last else min(m.number - 1, 1)]
    return Message(
        kind,
        DECODE,
        m.epoch,
        m.number,
        shape.chunks[m.number - 1],
        m.given + 1 if last else 0,
        source=PREFILL,
    )


def _stored(m: Prefill, shape: Shape) -> Message:
    return Message(
        Event.STORED, DECODE, m.epoch, ACK_STORED, shape.blocks, m.given + 1, source=PREFILL
    )


def _prefill_token(m: Prefill) -> Message:
    return Message(Event.PREFILL_TOKEN, ROUTER, m.epoch, m.given, source=PREFILL)


def _router_action(action: Action, m: Router, turn: _Turn) -> Router:
    message = turn.message
    match action:
        case Action.DELIVER:
            return _deliver(m, message.number, turn)
        case Action.NEXT_EPOCH:
            return m._replace(
                epoch=m.epoch + 1,
                given=m.delivered,
                early=0,
                local=turn.retry_local,
                released=(),
            )
        case Action.ISSUE:
            turn.messages.extend(_tickets(m))
        case Action.RELEASE_PREFILL:
            turn.messages.extend(_releases(m, (PREFILL,)))
        case Action.RELEASE_BOTH:
            turn.messages.extend(_releases(m, (PREFILL, DECODE)))
        case Action.NOTE_RELEASED:
            return m._replace(released=tuple(sorted({*m.released, message.source})))
        case Action.COUNT:
            turn.counted += 1
        case _:
            raise ValueError(f"the router has no action {action}")
    return m


def _deliver(m: Router, position: int, turn: _Turn) -> Router:
    """Pass on what is next, keep what is early, drop what was passed on."""
    if position < m.delivered:
        turn.counted += 1
        return m
    early, delivered = m.early | 1 << position, m.delivered
    while early >> delivered & 1:
        turn.delivered.append(delivered)
        early &= ~(1 << delivered)
        delivered += 1
    return m._replace(early=early, delivered=delivered)


def _tickets(m: Router) -> list[Message]:
    if m.local:
        return [
            Message(Event.RECOMPUTE, DECODE, m.epoch, m.given, 0, 0, m.decode_incarnation, ROUTER)
        ]
    return [
        Message(Event.TICKET, PREFILL, m.epoch, m.given, 0, 0, m.prefill_incarnation, ROUTER),
        Message(Event.OFFER, DECODE, m.epoch, m.given, 0, 0, m.decode_incarnation, ROUTER),
    ]


def _releases(m: Router, targets: tuple[str, ...]) -> list[Message]:
    return [
        Message(Event.RELEASE, target, m.epoch, source=ROUTER)
        for target in targets
        if target not in m.released
    ]
