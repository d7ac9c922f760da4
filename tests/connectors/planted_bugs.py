"""Copies of the hand-off's rules with one bug each."""

from __future__ import annotations

from collections.abc import Callable

from diptych.connectors.handoff import (
    RULES,
    Action,
    Age,
    Event,
    Rule,
    Rules,
    State,
    Table,
)

_TICKETS = (Event.TICKET, Event.OFFER, Event.RECOMPUTE)


def without_action(table: Table, action: Action) -> Table:
    return {
        key: Rule(rule.then, tuple(a for a in rule.do if a is not action))
        for key, rule in table.items()
    }


def without_event(table: Table, event: Event, *states: State) -> Table:
    return {
        key: rule
        for key, rule in table.items()
        if not (key[1] is event and (not states or key[0] in states))
    }


def no_valid_check() -> Rules:
    """Decode trusts what it has read."""
    table = dict(RULES.decode)
    for state in (State.RESERVED, State.READING):
        table[state, Event.ALL_READ, Age.CURRENT] = Rule(State.DECODING, ())
    return RULES._replace(decode=table)


def no_quarantine() -> Rules:
    """Blocks of a given-up read are free at once."""
    return RULES._replace(decode=without_action(RULES.decode, Action.QUARANTINE))


def epoch_ignored() -> Rules:
    """Messages of older attempts count as ones of the current attempt."""

    def merged(table: Table) -> Table:
        stale = {
            (state, event, Age.STALE): rule
            for (state, event, age), rule in table.items()
            if age is Age.CURRENT and event not in _TICKETS
        }
        return {**table, **stale}

    return Rules(*(merged(table) for table in RULES))


def release_dropped() -> Rules:
    """Nobody listens to RELEASE."""
    return RULES._replace(
        decode=without_event(RULES.decode, Event.RELEASE),
        prefill=without_event(RULES.prefill, Event.RELEASE),
    )


def read_done_not_repeated() -> Rules:
    """READ_DONE is sent once."""
    return RULES._replace(decode=without_event(RULES.decode, Event.REPEAT, State.VALIDATING))


def prefix_hits_not_leased() -> Rules:
    """Announcing holds the blocks computed here, not those that were found."""
    return RULES._replace(prefill=without_action(RULES.prefill, Action.LEASE_HITS))


BUGS: dict[str, Callable[[], Rules]] = {
    bug.__name__: bug
    for bug in (
        no_valid_check,
        no_quarantine,
        epoch_ignored,
        release_dropped,
        read_done_not_repeated,
        prefix_hits_not_leased,
    )
}
