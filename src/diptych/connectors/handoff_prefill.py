"""Prefill's machine: a projection that never waits."""

from __future__ import annotations

from diptych.connectors.handoff import ANNOUNCEMENTS, Action, Age, Event, Rules, State
from diptych.connectors.handoff_machines import (
    ACK_STORED,
    DECODE,
    PREFILL,
    ROUTER,
    Message,
    Outcome,
    Prefill,
    Shape,
    Turn,
    apply,
    ticket_age,
)


def step_prefill(
    rules: Rules, shape: Shape, machine: Prefill, event: Event, message: Message | None = None
) -> Outcome:
    """Prefill after `event`."""
    turn = Turn(shape, message or Message(event, PREFILL, machine.epoch), 0, False)
    age = ticket_age(machine, turn.message) if message else Age.CURRENT
    machine = apply(rules.prefill, machine, event, age, turn, _act)
    if machine.state is State.PREFILLING and machine.number == len(shape.chunks):
        done = Event.PROMPT_DONE_LAPSED if machine.lapsed else Event.PROMPT_DONE
        machine = apply(rules.prefill, machine, done, Age.CURRENT, turn, _act)
    return turn.outcome(machine)


def _act(action: Action, m: Prefill, turn: Turn) -> Prefill:
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
                turn.send(_announcement(m, shape))
            return m
        case Action.SAMPLE:
            turn.sampled = m.given
            turn.send(_prefill_token(m))
        case Action.RESEND_TOKEN:
            if message.number <= m.given:
                turn.send(_prefill_token(m))
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
            turn.send(Message(verdict, DECODE, m.epoch, source=PREFILL))
        case Action.ANSWER_GONE:
            turn.send(Message(Event.GONE, DECODE, message.epoch, source=PREFILL))
        case Action.SEND_STORED:
            if m.acked < ACK_STORED:
                turn.send(_stored(m, shape))
        case Action.SEND_REVOKE:
            turn.send(Message(Event.REVOKE, DECODE, m.epoch, source=PREFILL))
        case Action.REPORT:
            turn.send(Message(Event.FAILED, ROUTER, m.epoch, source=PREFILL))
        case Action.CONFIRM:
            turn.send(Message(Event.RELEASED, ROUTER, message.epoch, source=PREFILL))
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
