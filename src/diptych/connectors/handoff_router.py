"""The router's machine: tickets, retries, and tokens in order."""

from __future__ import annotations

from diptych.connectors.handoff import Action, Age, Event, Rules, State
from diptych.connectors.handoff_machines import (
    DECODE,
    PREFILL,
    ROUTER,
    Message,
    Outcome,
    Router,
    Shape,
    Turn,
    age_of,
    apply,
)


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
    turn = Turn(shape, message or Message(event, ROUTER, machine.epoch), 0, retry_local)
    age = age_of(machine.epoch, turn.message.epoch) if message and message.epoch else Age.CURRENT
    if _is_old_news(machine, turn.message):
        return Outcome(machine, counted=1)
    if _is_retry(rules, machine, event, age):
        if machine.epoch == shape.max_epoch:
            event = Event.OUT_OF_ATTEMPTS
        machine = machine._replace(
            prefill_incarnation=incarnations[0], decode_incarnation=incarnations[1]
        )
    machine = apply(rules.router, machine, event, age, turn, _act)
    if machine.delivered == shape.num_tokens and machine.state is not State.ENDED:
        machine = apply(rules.router, machine, Event.ALL_DELIVERED, Age.CURRENT, turn, _act)
    if len(machine.released) == 2:
        machine = apply(rules.router, machine, Event.BOTH_RELEASED, Age.CURRENT, turn, _act)
    return turn.outcome(machine)


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


def _act(action: Action, m: Router, turn: Turn) -> Router:
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


def _deliver(m: Router, position: int, turn: Turn) -> Router:
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
