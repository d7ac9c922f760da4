"""The hand-off's rules: one table, (state, event, age) to (state, actions), in three parts.

Decode owns a hand-off; prefill and router hold projections of it. Nothing here does anything:
`handoff_decode`, `handoff_prefill` and `handoff_router` apply the rules to values, `explore`
searches everything that can happen, and `docs/handoff.md` shows them. What has no rule is counted
and ignored, never an error: messages may be lost, repeated, late and out of order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class Age(enum.StrEnum):
    """A message's epoch against the machine's own."""

    CURRENT = "current"
    STALE = "stale"
    NEWER = "newer"


class State(enum.StrEnum):
    """Of all three machines; IDLE is one that knows nothing."""

    IDLE = "IDLE"
    # decode
    OFFERED = "OFFERED"
    DEFERRED = "DEFERRED"
    RESERVED = "RESERVED"
    READING = "READING"
    VALIDATING = "VALIDATING"
    STORE_READING = "STORE_READING"
    ASKING = "ASKING"
    DECODING = "DECODING"
    LOCAL = "LOCAL"
    ABORTED = "ABORTED"
    RELEASED = "RELEASED"
    REFUSED = "REFUSED"
    # prefill
    QUEUED = "QUEUED"
    PREFILLING = "PREFILLING"
    HOLDING = "HOLDING"
    STORED = "STORED"
    FREED = "FREED"
    # router
    ISSUED = "ISSUED"
    STREAMING = "STREAMING"
    ENDED = "ENDED"
    CLOSED = "CLOSED"


class Event(enum.StrEnum):
    """Messages first, then timers and what happens on the spot."""

    TICKET = "TICKET"
    OFFER = "OFFER"
    RECOMPUTE = "RECOMPUTE"
    RELEASE = "RELEASE"
    RELEASED = "RELEASED"
    PREFILL_STARTED = "PREFILL_STARTED"
    CHUNK = "CHUNK"
    COMMIT = "COMMIT"
    STORED = "STORED"
    REVOKE = "REVOKE"
    ACK = "ACK"
    RENEW = "RENEW"
    READ_DONE = "READ_DONE"
    VALID = "VALID"
    GONE = "GONE"
    FAILED = "FAILED"
    PREFILL_TOKEN = "PREFILL_TOKEN"
    DECODE_TOKEN = "DECODE_TOKEN"
    PREFILL_RESTARTED = "PREFILL_RESTARTED"
    DECODE_RESTARTED = "DECODE_RESTARTED"
    # timers
    REPEAT = "REPEAT"
    RENEW_DUE = "RENEW_DUE"
    TICKET_END = "TICKET_END"
    DEFER_DEADLINE = "DEFER_DEADLINE"
    READ_DEADLINE = "READ_DEADLINE"
    VERDICT_DEADLINE = "VERDICT_DEADLINE"
    RESERVE_DEADLINE = "RESERVE_DEADLINE"
    LEASE_END = "LEASE_END"
    ROUTER_GONE = "ROUTER_GONE"
    # on the spot
    STEP = "STEP"
    ROOM = "ROOM"
    NO_ROOM = "NO_ROOM"
    READ_OK = "READ_OK"
    READ_FAILED = "READ_FAILED"
    READ_ENDED = "READ_ENDED"
    STORE_READ = "STORE_READ"
    STORE_READ_FAILED = "STORE_READ_FAILED"
    PREEMPT = "PREEMPT"
    CANCEL = "CANCEL"
    # raised by a machine itself, as soon as they hold
    READS_POSTED = "READS_POSTED"
    ALL_READ = "ALL_READ"
    QUARANTINE_EMPTY = "QUARANTINE_EMPTY"
    LAST_TOKEN = "LAST_TOKEN"
    PROMPT_DONE = "PROMPT_DONE"
    PROMPT_DONE_LAPSED = "PROMPT_DONE_LAPSED"
    ALL_DELIVERED = "ALL_DELIVERED"
    OUT_OF_ATTEMPTS = "OUT_OF_ATTEMPTS"
    BOTH_RELEASED = "BOTH_RELEASED"


class Action(enum.StrEnum):
    """What a rule does besides changing the state, in the order written."""

    COUNT = "count"
    ADOPT = "adopt epoch"
    FREE = "free"
    REPORT = "report FAILED"
    CONFIRM = "send RELEASED"
    # decode
    NOTE = "note announcement"
    RESERVE = "reserve all blocks"
    ACK = "send ACK"
    POST_READS = "post reads"
    POST_STORE_READS = "post store reads"
    END_READ = "end read"
    KEEP = "keep block"
    KEEP_ALL = "keep all blocks"
    QUARANTINE = "quarantine reads"
    UNQUARANTINE = "unquarantine block"
    SEND_READ_DONE = "send READ_DONE"
    SEND_RENEW = "send RENEW"
    EMIT_TOKEN = "emit token"
    # prefill
    ADOPT_HELD = "rebind to epoch"
    COMPUTE = "compute chunk"
    LEASE_HITS = "lease prefix hits"
    LEASE_OWN = "lease own blocks"
    ANNOUNCE = "announce"
    SAMPLE = "sample token"
    RESEND_TOKEN = "send token again"
    NOTE_ACK = "note ack"
    FORGET_ACKS = "forget acks"
    EXTEND_LEASE = "extend lease"
    LAPSE = "lapse"
    KEEP_VALID = "keep verdict VALID"
    KEEP_GONE = "keep verdict GONE"
    ANSWER = "answer verdict"
    ANSWER_GONE = "answer GONE"
    SEND_STORED = "send STORED"
    SEND_REVOKE = "send REVOKE"
    # router
    DELIVER = "deliver in order"
    NEXT_EPOCH = "next epoch"
    ISSUE = "issue tickets"
    RELEASE_PREFILL = "send RELEASE to prefill"
    RELEASE_BOTH = "send RELEASE to both"
    NOTE_RELEASED = "note released"


class Rule(NamedTuple):
    """`then` None keeps the state."""

    then: State | None
    do: tuple[Action, ...]


Table = dict[tuple[State, Event, Age], Rule]


class Rules(NamedTuple):
    """The three parts; values, so that a test may plant a bug in a copy."""

    decode: Table
    prefill: Table
    router: Table


class Row(NamedTuple):
    """One line of a table, for several states at once."""

    states: tuple[State, ...]
    event: Event
    ages: tuple[Age, ...]
    then: State | None
    do: tuple[Action, ...]


S, E, A = State, Event, Action
_NOW, _LATER, _NEW = (Age.CURRENT,), (Age.CURRENT, Age.NEWER), (Age.NEWER,)
_KNOWN, _OLD, _FOREIGN = (Age.CURRENT, Age.STALE), (Age.STALE,), (Age.STALE, Age.NEWER)

DECODE_STATES = tuple(S)[: tuple(S).index(S.QUEUED)]
PREFILL_STATES = (S.IDLE, S.QUEUED, S.PREFILLING, S.HOLDING, S.STORED, S.FREED)
ROUTER_STATES = (S.ISSUED, S.STREAMING, S.ENDED, S.CLOSED)

ANNOUNCEMENTS = (E.PREFILL_STARTED, E.CHUNK, E.COMMIT)
# Only a new epoch or RELEASE takes decode out of these.
DECODE_ENDS = (S.IDLE, S.RELEASED, S.REFUSED)
PREFILL_ENDS = (S.IDLE, S.STORED, S.FREED)

_EARLY = (S.OFFERED, S.DEFERRED)
_PULLING = (S.RESERVED, S.READING)
_FROM_PREFILL = (*_PULLING, S.VALIDATING)
_DROP = (A.QUARANTINE, A.FREE)
_GIVE_UP = (*_DROP, A.REPORT)


def _row(
    states: State | tuple[State, ...],
    events: Event | tuple[Event, ...],
    then: State | None,
    *do: Action,
    ages: tuple[Age, ...] = _NOW,
) -> list[Row]:
    if isinstance(states, State):
        states = (states,)
    if isinstance(events, Event):
        events = (events,)
    return [Row(states, event, ages, then, do) for event in events]


DECODE_ROWS: list[Row] = [
    *_row(DECODE_STATES, E.OFFER, S.OFFERED, *_DROP, A.ADOPT, ages=_NEW),
    *_row(DECODE_STATES, E.OFFER, None, A.COUNT, ages=_KNOWN),
    *_row(DECODE_STATES, E.RECOMPUTE, S.LOCAL, *_DROP, A.ADOPT, A.RESERVE, A.KEEP_ALL, ages=_NEW),
    *_row(DECODE_STATES, E.RECOMPUTE, None, A.COUNT, ages=_KNOWN),
    *_row(DECODE_STATES, E.RELEASE, S.ABORTED, *_DROP, A.ADOPT, A.CONFIRM, ages=_LATER),
    *_row(DECODE_STATES, E.RELEASE, None, A.COUNT, ages=_OLD),
    *_row(S.OFFERED, ANNOUNCEMENTS, S.RESERVED, A.NOTE, A.RESERVE, A.ACK, A.POST_READS),
    *_row(S.OFFERED, E.NO_ROOM, S.DEFERRED, A.NOTE),
    *_row(S.OFFERED, E.TICKET_END, S.REFUSED, A.REPORT),
    *_row(S.DEFERRED, ANNOUNCEMENTS, None, A.NOTE),
    *_row(S.DEFERRED, E.ROOM, S.RESERVED, A.RESERVE, A.ACK, A.POST_READS),
    *_row(S.DEFERRED, E.DEFER_DEADLINE, S.REFUSED, A.REPORT),
    *_row(S.RESERVED, E.READS_POSTED, S.READING),
    *_row(_PULLING, ANNOUNCEMENTS, None, A.NOTE, A.ACK, A.POST_READS),
    *_row(_PULLING, E.READ_OK, None, A.END_READ, A.KEEP),
    *_row(_PULLING, E.READ_FAILED, S.ASKING, A.END_READ, *_GIVE_UP),
    *_row(_PULLING, E.READ_DEADLINE, S.ASKING, *_GIVE_UP),
    *_row(_PULLING, E.ALL_READ, S.VALIDATING, A.SEND_READ_DONE),
    *_row(_FROM_PREFILL, E.RENEW_DUE, None, A.SEND_RENEW),
    *_row(_FROM_PREFILL, (E.REVOKE, E.GONE), S.ASKING, *_GIVE_UP),
    *_row((*_EARLY, *_FROM_PREFILL), E.PREFILL_RESTARTED, S.ASKING, *_GIVE_UP),
    *_row(S.VALIDATING, ANNOUNCEMENTS, None, A.ACK),
    *_row(S.VALIDATING, E.REPEAT, None, A.SEND_READ_DONE),
    *_row(S.VALIDATING, E.VALID, S.DECODING),
    *_row(S.VALIDATING, E.VERDICT_DEADLINE, S.ASKING, *_GIVE_UP),
    *_row(
        (*_EARLY, *_FROM_PREFILL),
        E.STORED,
        S.STORE_READING,
        *(A.QUARANTINE, A.FREE, A.NOTE, A.RESERVE, A.ACK, A.POST_STORE_READS),
    ),
    *_row(S.STORE_READING, E.STORED, None, A.ACK),
    *_row(S.STORE_READING, E.STORE_READ, S.DECODING, A.KEEP_ALL),
    *_row(S.STORE_READING, E.STORE_READ_FAILED, S.ASKING, *_GIVE_UP),
    *_row((S.DECODING, S.LOCAL), E.STEP, None, A.EMIT_TOKEN),
    *_row((S.DECODING, S.LOCAL), E.LAST_TOKEN, S.RELEASED, A.FREE),
    *_row(DECODE_STATES, E.READ_ENDED, None, A.UNQUARANTINE),
    *_row(S.ABORTED, E.QUARANTINE_EMPTY, S.RELEASED),
    *_row(DECODE_STATES, E.ROUTER_GONE, S.ABORTED, *_DROP),
]

PREFILL_ROWS: list[Row] = [
    *_row(PREFILL_ENDS, E.TICKET, S.QUEUED, A.ADOPT, ages=_NEW),
    *_row(S.QUEUED, E.TICKET, None, A.ADOPT, ages=_NEW),
    *_row(S.PREFILLING, E.TICKET, None, A.ADOPT_HELD, A.ANNOUNCE, ages=_NEW),
    *_row(S.HOLDING, E.TICKET, None, A.ADOPT_HELD, A.RESEND_TOKEN, A.ANNOUNCE, ages=_NEW),
    *_row(PREFILL_STATES, E.TICKET, None, A.COUNT, ages=_KNOWN),
    *_row(PREFILL_STATES, E.RELEASE, S.FREED, A.ADOPT, A.KEEP_GONE, A.FREE, A.CONFIRM, ages=_LATER),
    *_row(PREFILL_STATES, E.RELEASE, None, A.COUNT, ages=_OLD),
    *_row(S.QUEUED, E.STEP, S.PREFILLING, A.ANNOUNCE),
    *_row(S.PREFILLING, E.STEP, None, A.COMPUTE, A.LEASE_HITS, A.LEASE_OWN, A.ANNOUNCE),
    *_row(S.PREFILLING, E.PROMPT_DONE, S.HOLDING, A.SAMPLE),
    *_row(
        S.PREFILLING,
        E.PROMPT_DONE_LAPSED,
        S.STORED,
        *(A.SAMPLE, A.KEEP_GONE, A.SEND_STORED, A.FREE),
    ),
    *_row((S.PREFILLING, S.HOLDING), E.REPEAT, None, A.ANNOUNCE),
    *_row(S.STORED, E.REPEAT, None, A.SEND_STORED),
    *_row((S.PREFILLING, S.HOLDING, S.STORED), E.ACK, None, A.NOTE_ACK),
    # of an announcement that was repeated, as each RENEW has it
    *_row(S.FREED, E.ACK, None),
    *_row((S.PREFILLING, S.HOLDING), E.RENEW, None, A.EXTEND_LEASE),
    *_row(S.HOLDING, E.READ_DONE, S.FREED, A.KEEP_VALID, A.ANSWER, A.FREE),
    *_row((S.STORED, S.FREED), E.READ_DONE, None, A.ANSWER),
    *_row((S.QUEUED, S.PREFILLING), E.READ_DONE, None, A.LAPSE, A.KEEP_GONE, A.ANSWER),
    *_row(S.IDLE, E.READ_DONE, None, A.ANSWER_GONE),
    *_row(PREFILL_STATES, E.READ_DONE, None, A.ANSWER_GONE, ages=_FOREIGN),
    # a reader that did not hear of the end, or heard of it before it could use it
    *_row(S.FREED, E.RENEW, None, A.ANSWER),
    *_row(S.IDLE, E.RENEW, None, A.ANSWER_GONE),
    *_row(PREFILL_STATES, E.RENEW, None, A.ANSWER_GONE, ages=_FOREIGN),
    *_row(S.PREFILLING, E.LEASE_END, None, A.LAPSE),
    *_row(S.HOLDING, E.LEASE_END, S.FREED, A.LAPSE, A.KEEP_GONE, A.REPORT, A.FREE),
    *_row(S.HOLDING, E.RESERVE_DEADLINE, S.STORED, A.KEEP_GONE, A.SEND_STORED, A.FREE),
    *_row(
        (S.PREFILLING, S.HOLDING),
        E.PREEMPT,
        S.FREED,
        *(A.LAPSE, A.KEEP_GONE, A.SEND_REVOKE, A.REPORT, A.FREE),
    ),
    *_row((S.PREFILLING, S.HOLDING), E.DECODE_RESTARTED, None, A.FORGET_ACKS),
    *_row(PREFILL_STATES, E.ROUTER_GONE, S.FREED, A.KEEP_GONE, A.FREE),
]

_OPEN = (S.ISSUED, S.STREAMING)
ROUTER_ROWS: list[Row] = [
    *_row(S.ISSUED, E.REPEAT, None, A.ISSUE),
    *_row(_OPEN, E.PREFILL_TOKEN, None, A.DELIVER),
    *_row(S.ISSUED, E.DECODE_TOKEN, S.STREAMING, A.DELIVER, A.RELEASE_PREFILL),
    *_row(S.STREAMING, E.DECODE_TOKEN, None, A.DELIVER),
    *_row(S.STREAMING, E.REPEAT, None, A.RELEASE_PREFILL),
    *_row(S.ISSUED, (E.FAILED, E.PREFILL_RESTARTED), None, A.NEXT_EPOCH, A.ISSUE),
    *_row(_OPEN, E.DECODE_RESTARTED, S.ISSUED, A.NEXT_EPOCH, A.ISSUE),
    *_row(_OPEN, E.OUT_OF_ATTEMPTS, S.ENDED, A.RELEASE_BOTH),
    *_row(_OPEN, E.ALL_DELIVERED, S.ENDED, A.RELEASE_BOTH),
    *_row(_OPEN, E.CANCEL, S.ENDED, A.RELEASE_BOTH),
    *_row(S.ENDED, E.REPEAT, None, A.RELEASE_BOTH),
    *_row((S.STREAMING, S.ENDED), E.RELEASED, None, A.NOTE_RELEASED),
    *_row(S.ENDED, E.BOTH_RELEASED, S.CLOSED),
    *_row(ROUTER_STATES, (E.PREFILL_TOKEN, E.DECODE_TOKEN), None, A.COUNT, ages=_OLD),
]


def table_of(rows: Iterable[Row]) -> Table:
    """The rows as a look-up.

    Raises:
        ValueError: two rows speak of the same case.
    """
    table: Table = {}
    for row in rows:
        for state in row.states:
            for age in row.ages:
                if (state, row.event, age) in table:
                    raise ValueError(f"two rules for {state} {row.event} {age}")
                table[state, row.event, age] = Rule(row.then, row.do)
    return table


RULES = Rules(table_of(DECODE_ROWS), table_of(PREFILL_ROWS), table_of(ROUTER_ROWS))


def markdown() -> str:
    """The three tables as `docs/handoff.md` shows them."""
    parts = [
        _markdown_table("Decode (owner)", DECODE_ROWS, DECODE_STATES),
        _markdown_table("Prefill", PREFILL_ROWS, PREFILL_STATES),
        _markdown_table("Router", ROUTER_ROWS, ROUTER_STATES),
    ]
    return "\n".join(parts)


def _markdown_table(title: str, rows: Iterable[Row], all_states: tuple[State, ...]) -> str:
    lines = [f"### {title}", "", "| in | on | epoch | then | do |", "|---|---|---|---|---|"]
    for row in rows:
        states = "any" if row.states == all_states else ", ".join(row.states)
        ages = "" if row.ages == _NOW else ", ".join(row.ages)
        then = row.then or "stays"
        lines.append(f"| {states} | {row.event} | {ages} | {then} | {', '.join(row.do)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
