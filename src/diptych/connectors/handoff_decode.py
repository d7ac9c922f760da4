"""Decode's machine: the owner of a hand-off."""

from __future__ import annotations

from diptych.connectors.handoff import Action, Age, Event, Rules, State
from diptych.connectors.handoff_machines import (
    ACK_STORED,
    DECODE,
    PREFILL,
    ROUTER,
    Decode,
    Message,
    Outcome,
    Shape,
    Turn,
    apply,
    ticket_age,
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
    turn = Turn(shape, message or Message(event, DECODE, machine.epoch), block, False)
    age = ticket_age(machine, turn.message) if message else Age.CURRENT
    machine = apply(rules.decode, machine, event, age, turn, _act)
    while (own := _raised(shape, machine)) is not None:
        machine = apply(rules.decode, machine, own, Age.CURRENT, turn, _act)
    return turn.outcome(machine)


def _raised(shape: Shape, machine: Decode) -> Event | None:
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


def _act(action: Action, m: Decode, turn: Turn) -> Decode:
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
            turn.send(Message(Event.DECODE_TOKEN, ROUTER, m.epoch, m.position, source=DECODE))
            return m._replace(position=m.position + 1)
        case Action.COUNT:
            turn.counted += 1
        case Action.ACK:
            number = ACK_STORED if message.kind is Event.STORED else m.number
            turn.send(Message(Event.ACK, PREFILL, m.epoch, number, source=DECODE))
        case Action.SEND_READ_DONE:
            turn.send(Message(Event.READ_DONE, PREFILL, m.epoch, source=DECODE))
        case Action.SEND_RENEW:
            turn.send(Message(Event.RENEW, PREFILL, m.epoch, source=DECODE))
        case Action.REPORT:
            turn.send(Message(Event.FAILED, ROUTER, m.epoch, source=DECODE))
        case Action.CONFIRM:
            turn.send(Message(Event.RELEASED, ROUTER, message.epoch, source=DECODE))
        case _:
            raise ValueError(f"decode has no action {action}")
    return m
