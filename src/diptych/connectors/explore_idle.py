"""Which messages can have no effect any more, by the rules that are explored (planted bugs too)."""

from __future__ import annotations

from functools import cache

from diptych.connectors.handoff import ANNOUNCEMENTS, Action, Age, Event, Rule, Rules, State, Table
from diptych.connectors.handoff_machines import (
    ACK_STORED,
    DECODE,
    PREFILL,
    TICKETS,
    Decode,
    Message,
    Prefill,
    Router,
)


class IdleMessages:
    """Answers `of`; what it calls idle may leave the network unseen."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._can_act = cache(self._can_act_uncached)
        self._reach = cache(self._reach_uncached)

    def of(self, message: Message, router: Router, prefill: Prefill, decode: Decode) -> bool:
        """Whether the message does nothing now and whatever follows."""
        if message.target == PREFILL:
            return self._is_known_ack(message, prefill) or self._by_rules(
                message, PREFILL, prefill.state, prefill.epoch, prefill.incarnation
            )
        if message.target == DECODE:
            return self._is_superseded(message, decode) or self._by_rules(
                message, DECODE, decode.state, decode.epoch, decode.incarnation
            )
        if message.kind in (Event.PREFILL_RESTARTED, Event.DECODE_RESTARTED):
            return router.state in (State.ENDED, State.CLOSED)
        return self._by_rules(message, "router", router.state, router.epoch, message.incarnation)

    def _by_rules(
        self, message: Message, target: str, state: State, epoch: int, incarnation: int
    ) -> bool:
        is_ticket = message.kind in TICKETS
        if message.epoch > epoch and not (is_ticket and message.incarnation != incarnation):
            return False
        age = Age.CURRENT if message.epoch == epoch else Age.STALE
        if is_ticket and message.incarnation != incarnation:
            age = Age.STALE
        return not self._can_act(target, state, age, message.kind)

    def _is_known_ack(self, message: Message, prefill: Prefill) -> bool:
        same = message.kind is Event.ACK and message.epoch == prefill.epoch
        needed = ACK_STORED if prefill.state is State.STORED else prefill.acked + 1
        return same and message.number < needed

    def _is_superseded(self, message: Message, decode: Decode) -> bool:
        """A later announcement is known: at most the same ACK would be sent once more."""
        late = message.epoch == decode.epoch and message.number < decode.number
        return late and message.kind in ANNOUNCEMENTS

    def _can_act_uncached(self, target: str, state: State, age: Age, kind: Event) -> bool:
        table = self._table(target)
        states = {key[0] for key in table}
        later = any(_acts(table.get((s, kind, Age.STALE))) for s in states)
        if kind not in TICKETS and target != "router":
            # a restart forgets the epoch
            later = later or any(_acts(table.get((s, kind, Age.NEWER))) for s in states)
        if age is Age.STALE or later:
            return later
        return any(_acts(table.get((s, kind, age))) for s in self._reach(target, state))

    def _reach_uncached(self, target: str, state: State) -> frozenset[State]:
        """States that this one can lead to within the same epoch."""
        found, todo = {state}, [state]
        while todo:
            at = todo.pop()
            for (before, event, age), rule in self._table(target).items():
                same_epoch = age is not Age.NEWER and Action.NEXT_EPOCH not in rule.do
                then = rule.then
                if before is at and same_epoch and then is not None and then not in found:
                    if event in TICKETS and target != "router":
                        continue
                    found.add(then)
                    todo.append(then)
        return frozenset(found)

    def _table(self, target: str) -> Table:
        if target == PREFILL:
            return self._rules.prefill
        return self._rules.decode if target == DECODE else self._rules.router


def _acts(rule: Rule | None) -> bool:
    return rule is not None and (
        rule.then is not None or any(action is not Action.COUNT for action in rule.do)
    )
