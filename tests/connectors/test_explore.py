"""Everything that can happen to one hand-off keeps the invariants; a planted bug breaks one."""

from __future__ import annotations

import pytest

from diptych.connectors import explore
from diptych.connectors.explore import Explorer
from diptych.connectors.explore_world import (
    DMA_TARGET,
    ENDS,
    LEAK,
    NEVER_WAITS,
    ONE_END,
    POSITIONS,
    SHAPE,
    VALID_KV,
)
from diptych.connectors.handoff import RULES, Action, Age, Event, Rule, Rules, State
from tests.connectors.planted_bugs import BUGS, without_action, without_event


@pytest.mark.timeout(600)
def test_every_invariant_holds_under_two_faults() -> None:
    one_chunk = SHAPE._replace(chunks=(0, 0b11), num_tokens=2)
    report = Explorer(shape=one_chunk, faults=2).run()
    assert (report.violated, report.trace) == (None, [])
    assert report.num_states > 100_000


@pytest.mark.parametrize("num_tokens", [1, 3], ids=["token 1 ends it", "three tokens"])
def test_every_invariant_holds_with_two_chunks_under_one_fault(num_tokens: int) -> None:
    report = Explorer(shape=SHAPE._replace(num_tokens=num_tokens), faults=1).run()
    assert (report.violated, report.trace) == (None, [])
    assert report.num_states > 15_000


@pytest.mark.parametrize(
    ("bug", "invariant"),
    [
        ("no_valid_check", VALID_KV),
        ("no_quarantine", DMA_TARGET),
        ("epoch_ignored", POSITIONS),
        ("release_dropped", LEAK),
        ("read_done_not_repeated", ENDS),
        ("prefix_hits_not_leased", VALID_KV),
    ],
)
def test_a_planted_bug_breaks_an_invariant_and_shows_how(bug: str, invariant: str) -> None:
    report = Explorer(BUGS[bug](), faults=1).run()
    print(bug, report.violated, *report.trace, sep="\n  ")
    assert report.violated == invariant
    assert len(report.trace) > 3


def offers_reopen() -> Rules:
    """A ticket that arrives twice is taken twice."""
    table = dict(RULES.decode)
    for state in (State.RELEASED, State.REFUSED):
        table[state, Event.OFFER, Age.CURRENT] = Rule(State.OFFERED, (Action.ADOPT,))
    return RULES._replace(decode=table)


def prefill_waits_for_a_reservation() -> Rules:
    """A step of prefill does nothing until decode has answered."""
    return RULES._replace(prefill=without_event(RULES.prefill, Event.STEP, State.PREFILLING))


def sampled_again() -> Rules:
    """A rebound prefill samples anew what the client has."""
    table = dict(RULES.prefill)
    rule = table[State.HOLDING, Event.TICKET, Age.NEWER]
    table[State.HOLDING, Event.TICKET, Age.NEWER] = Rule(rule.then, (*rule.do, Action.SAMPLE))
    return RULES._replace(prefill=table)


def lease_outlives_verdict() -> Rules:
    """Prefill answers VALID and holds on."""
    table = dict(RULES.prefill)
    table[State.HOLDING, Event.READ_DONE, Age.CURRENT] = Rule(
        State.FREED, (Action.KEEP_VALID, Action.ANSWER)
    )
    table[State.FREED, Event.RELEASE, Age.CURRENT] = Rule(None, (Action.CONFIRM,))
    return RULES._replace(prefill=table)


def lapse_forgotten() -> Rules:
    """A lease that has lapsed is validated all the same."""
    return RULES._replace(prefill=without_action(RULES.prefill, Action.KEEP_GONE))


@pytest.mark.parametrize(
    ("bug", "invariants"),
    [
        (offers_reopen, {ONE_END}),
        (prefill_waits_for_a_reservation, {NEVER_WAITS}),
        (sampled_again, {POSITIONS}),
        (lease_outlives_verdict, {LEAK, ENDS}),
    ],
)
def test_every_invariant_can_fail(bug: object, invariants: set[str]) -> None:
    assert callable(bug)
    assert Explorer(bug(), faults=1).run().violated in invariants


def test_the_command_prints_the_states_visited(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--faults", "0"]) == 0
    printed = capsys.readouterr().out
    assert "states" in printed
    assert "all invariants hold" in printed
