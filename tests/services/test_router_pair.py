"""The routing state of a request whose prefill and decode run at once, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.request import FinishReason, KVCommit
from diptych.services.router.routable import Role, RoutableWorker
from diptych.services.router.route import Attempt, Entry, Outcome, RequestRoute, Stage, Step
from diptych.services.router.ways import Auto, Direct, Obstacle


@dataclass(frozen=True)
class Worker:
    key: str
    role: Role
    kv_namespace: str = "ns"
    direct: bool = True
    stores: bool = False
    links: frozenset[str] = frozenset()

    @property
    def incarnation(self) -> str:
        return self.key

    def reads(self, incarnation: str) -> float | None:
        return 1.0 if incarnation in self.links else None


@dataclass(frozen=True)
class Ways:
    """All pairs but those `without`."""

    without: frozenset[tuple[str, str]] = frozenset()

    def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
        return Obstacle.NO_LINK if (prefill.key, decode.key) in self.without else None


P1, P2 = Worker("p1", Role.PREFILL), Worker("p2", Role.PREFILL)
D1, D2 = Worker("d1", Role.DECODE), Worker("d2", Role.DECODE)
A1 = Worker("a1", Role.AGGREGATED)
LEFT_TO_STORE = KVCommit(
    epoch=1, kv_namespace="ns", num_tokens=5, objects=[], connector="StoreConnector"
)


def entry(position: int, *token_ids: int, epoch: int = 1, **fields: Any) -> Entry:
    return Entry(epoch=epoch, first_position=position, token_ids=list(token_ids), **fields)


def pair(max_tokens: int = 10, **ways: Any) -> RequestRoute:
    """A request that runs on p1 and d1."""
    route = RequestRoute(max_tokens, ways=Ways(**ways))
    route.begin(P1, Stage.PAIR, D1)
    return route


def tokens(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps if step.released for token in step.released.token_ids]


def say(route: RequestRoute, key: str, said: Entry) -> tuple[list[int], list[Outcome]]:
    steps = list(route.steps(key, said))
    return tokens(steps), [step.outcome for step in steps]


def test_both_workers_have_one_epoch() -> None:
    route = RequestRoute(10, ways=Ways())
    assert route.options([P1, P2, D1]) == {"p1": Stage.PAIR, "p2": Stage.PAIR}
    assert route.partners([P1, P2, D1, D2, A1], P1) == {"d1": Stage.DECODE, "d2": Stage.DECODE}
    attempt = route.begin(P1, Stage.PAIR, D1)
    assert (attempt.epoch, attempt.keys, attempt.commit) == (1, ("p1", "d1"), None)


def test_an_aggregated_worker_competes_with_pairs() -> None:
    route = RequestRoute(10, ways=Ways())
    assert route.options([P1, D1, A1]) == {"p1": Stage.PAIR, "a1": Stage.WHOLE}


@pytest.mark.parametrize(
    ("stores", "expected"), [(True, {"p1": Stage.PREFILL}), (False, {"d1": Stage.WHOLE})]
)
def test_without_a_link_the_store_carries_or_decode_does_all(
    stores: bool, expected: dict[str, Stage]
) -> None:
    ways = Ways(frozenset({("p1", "d1")}))
    workers = [replace(worker, stores=stores) for worker in (P1, D1)]
    assert RequestRoute(10, ways=ways).options(workers) == expected


def test_prefill_workers_with_a_link_go_before_those_without() -> None:
    ways = Ways(frozenset({("p1", "d1")}))
    workers = [replace(worker, stores=True) for worker in (P1, P2, D1)]
    assert RequestRoute(10, ways=ways).options(workers) == {"p2": Stage.PAIR}


def test_a_decode_worker_of_another_namespace_makes_no_pair() -> None:
    other = Worker("d3", Role.DECODE, kv_namespace="other")
    assert RequestRoute(10, ways=Ways()).partners([other, D1], P1) == {"d1": Stage.DECODE}


def test_token_1_comes_from_prefill_and_the_rest_from_decode() -> None:
    route = pair()
    assert say(route, "p1", entry(0, 11)) == ([11], [Outcome.CONTINUE])
    assert route.awaits_handoff
    assert say(route, "d1", entry(1, 12, 13)) == ([12, 13], [Outcome.TAKEN_OVER])
    assert not route.awaits_handoff
    assert say(route, "d1", entry(3, 14)) == ([14], [Outcome.CONTINUE])
    end = entry(4, 15, finish_reason=FinishReason.STOP)
    assert say(route, "d1", end) == ([15], [Outcome.FINISHED])
    assert route.attempt is None


def test_what_decode_says_before_token_1_came_waits_for_it() -> None:
    route = pair(4)
    assert say(route, "d1", entry(1, 12)) == ([], [Outcome.CONTINUE])
    end = entry(2, 13, 14, finish_reason=FinishReason.LENGTH)
    assert say(route, "d1", end) == ([], [Outcome.CONTINUE])
    steps = list(route.steps("p1", entry(0, 11)))
    assert tokens(steps) == [11, 12, 13, 14]
    expected = [(Outcome.CONTINUE, "p1"), (Outcome.TAKEN_OVER, "d1"), (Outcome.FINISHED, "d1")]
    assert [(step.outcome, step.worker_key) for step in steps] == expected


def test_a_decode_worker_may_repeat_token_1() -> None:
    route = pair()
    assert say(route, "d1", entry(0, 11, 12)) == ([11, 12], [Outcome.TAKEN_OVER])
    assert say(route, "p1", entry(0, 11)) == ([], [Outcome.STALE])


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_token_1_may_be_the_end(reason: FinishReason) -> None:
    route = pair(max_tokens=1 if reason is FinishReason.LENGTH else 10)
    assert say(route, "p1", entry(0, 11, finish_reason=reason)) == ([11], [Outcome.FINISHED])
    assert say(route, "d1", entry(1, 12)) == ([], [Outcome.STALE])


def test_the_end_of_prefills_part_is_not_the_end() -> None:
    route = pair()
    end = entry(0, 11, finish_reason=FinishReason.LENGTH)
    assert say(route, "p1", end) == ([11], [Outcome.CONTINUE])


def test_a_prefill_that_is_lost_early_is_replaced_and_its_decode_stays() -> None:
    route = pair()
    assert route.on_lost("p1", "gone")
    assert route.options([P1, P2, D1]) == {"p2": Stage.PAIR}
    assert route.begin(P2, Stage.PAIR, D1).epoch == 2
    assert say(route, "d1", entry(1, 12)) == ([], [Outcome.STALE])


def test_a_decode_that_is_lost_before_token_1_leaves_prefill_another() -> None:
    route = pair()
    assert route.on_lost("d1", "gone")
    assert route.options([P1, D1, D2]) == {"p1": Stage.PAIR}
    assert route.partners([D1, D2], P1) == {"d2": Stage.DECODE}


def test_a_prefill_lost_after_token_1_is_replaced_or_decode_does_the_rest() -> None:
    route = pair()
    say(route, "p1", entry(0, 11))
    assert route.on_lost("p1", "gone")
    assert route.options([P1, D1, D2]) == {"d1": Stage.WHOLE, "d2": Stage.WHOLE}
    assert route.options([P1, P2, D1]) == {"p2": Stage.PAIR}
    assert route.begin(P2, Stage.PAIR, D1).output_token_ids == (11,)
    assert route.awaits_token
    assert say(route, "p2", entry(1, 12, epoch=2)) == ([12], [Outcome.CONTINUE])
    assert route.awaits_handoff
    assert say(route, "d1", entry(2, 13, epoch=2)) == ([13], [Outcome.TAKEN_OVER])


def test_a_decode_lost_in_the_middle_leaves_prefill_another() -> None:
    route = pair()
    say(route, "p1", entry(0, 11))
    say(route, "d1", entry(1, 12, 13))
    assert route.on_lost("d1", "gone")
    assert route.options([P1, D1, D2]) == {"p1": Stage.PAIR}
    assert route.begin(P1, Stage.PAIR, D2).output_token_ids == (11, 12, 13)


def test_a_prefill_is_not_missed_once_decode_has_taken_over() -> None:
    route = pair()
    say(route, "p1", entry(0, 11))
    say(route, "d1", entry(1, 12))
    assert not route.on_lost("p1", "gone")
    assert say(route, "p1", entry(1, error="aborted")) == ([], [Outcome.STALE])
    assert say(route, "d1", entry(2, 13)) == ([13], [Outcome.CONTINUE])


def test_a_failed_read_goes_to_another_pair_then_to_decode_alone() -> None:
    route = pair()
    assert say(route, "d1", entry(0, handoff_failed="the lease lapsed")) == ([], [Outcome.LOST])
    assert route.options([P1, D1]) == {"d1": Stage.WHOLE}
    assert route.options([P1, P2, D1]) == {"p2": Stage.PAIR}
    route.begin(P2, Stage.PAIR, D1)
    route.fail("the lease lapsed again")
    assert route.options([P1, P2, D1, D2]) == {"d1": Stage.WHOLE, "d2": Stage.WHOLE}


def test_a_failed_read_goes_through_the_store_where_there_is_one() -> None:
    route = pair()
    say(route, "d1", entry(0, handoff_failed="the lease lapsed"))
    p1, p2, d1, d2 = (replace(worker, stores=True) for worker in (P1, P2, D1, D2))
    assert route.options([p1, d1]) == {"p1": Stage.PREFILL}
    # before another pair: its prefill worker would have to compute what the store may have
    assert route.options([p1, p2, d1, d2]) == {"p1": Stage.PREFILL, "p2": Stage.PREFILL}
    assert route.options([p1, P2, D1, D2]) == {"p1": Stage.PAIR, "p2": Stage.PAIR}


def test_kv_that_prefill_left_to_the_store_is_not_with_decode_yet() -> None:
    """A reader that cannot be reached does not hear of it: another attempt follows in time."""
    route = pair()
    say(route, "p1", entry(0, 11))
    assert say(route, "p1", entry(1, commit=LEFT_TO_STORE)) == ([], [Outcome.CONTINUE])
    assert route.awaits_handoff
    assert say(route, "d1", entry(1, 12)) == ([12], [Outcome.TAKEN_OVER])
    assert not route.awaits_handoff


def test_prefill_may_go_once_it_has_left_its_kv_to_the_store() -> None:
    """Decode may wait for room meanwhile: what was computed is not computed again."""
    route = pair()
    say(route, "p1", entry(0, 11))
    say(route, "p1", entry(1, commit=LEFT_TO_STORE))
    assert not route.on_lost("p1", "it was drained")
    assert route.awaits_handoff, "for its time only"
    assert say(route, "d1", entry(1, 12)) == ([12], [Outcome.TAKEN_OVER])


def test_a_decode_worker_that_did_not_hear_of_the_store_ends_the_attempt() -> None:
    route = pair()
    say(route, "p1", entry(0, 11, commit=LEFT_TO_STORE))
    assert not route.on_lost("p1", "it died")
    failed = entry(1, handoff_failed="the prefill worker is gone")
    assert say(route, "d1", failed) == ([], [Outcome.LOST])
    assert route.options([P2, D1]) == {"p2": Stage.PAIR}


def test_a_decode_worker_that_is_lost_is_missed_though_the_store_has_the_kv() -> None:
    route = pair()
    say(route, "p1", entry(0, 11, commit=LEFT_TO_STORE))
    assert route.on_lost("d1", "it died")


def test_prefill_is_missed_until_token_1_is_here() -> None:
    route = pair()
    say(route, "p1", entry(1, commit=LEFT_TO_STORE))
    assert route.on_lost("p1", "it died")


def test_that_there_are_partners_is_known_without_asking_for_all_pairs() -> None:
    asked: list[tuple[str, str]] = []

    class Counting(Ways):
        def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
            asked.append((prefill.key, decode.key))
            return None

    prefills = [Worker(f"p{number}", Role.PREFILL) for number in range(20)]
    decodes = [Worker(f"d{number}", Role.DECODE) for number in range(20)]
    RequestRoute(10, ways=Counting()).options([*prefills, *decodes])
    assert len(asked) == 20


def test_prefills_commit_says_that_decode_has_all() -> None:
    route = pair()
    say(route, "p1", entry(0, 11))
    commit = KVCommit(epoch=1, kv_namespace="ns", num_tokens=5, objects=[], connector="D")
    assert say(route, "p1", entry(1, commit=commit)) == ([], [Outcome.TAKEN_OVER])
    assert not route.on_lost("p1", "gone")
    assert say(route, "d1", entry(1, 12)) == ([12], [Outcome.CONTINUE])


def test_kv_that_decode_did_not_take_is_a_loss() -> None:
    route = pair()
    say(route, "p1", entry(0, 11))
    commit = KVCommit(epoch=1, kv_namespace="ns", num_tokens=0, objects=[], connector="D")
    assert say(route, "p1", entry(1, commit=commit)) == ([], [Outcome.LOST])
    assert route.options([P1, D1]) == {"d1": Stage.WHOLE}


def test_a_worker_with_an_error_of_its_own_is_left_out() -> None:
    route = pair()
    assert say(route, "d1", entry(0, error="the engine died")) == ([], [Outcome.LOST])
    assert route.partners([D1, D2], P1) == {"d2": Stage.DECODE}


def test_direct_takes_every_pair_that_could_and_auto_only_those_whose_link_was_tested() -> None:
    linked = Worker("d3", Role.DECODE, links=frozenset({"p1"}))
    other = Worker("d4", Role.DECODE, direct=False)
    each = (D1, linked, other)
    not_direct = Obstacle.DECODE_NOT_DIRECT
    assert [Direct().obstacle(P1, decode) for decode in each] == [None, None, not_direct]
    no_link = Obstacle.NO_LINK
    assert [Auto().obstacle(P1, decode) for decode in each] == [no_link, None, not_direct]
    of_store = replace(P1, direct=False)
    assert Direct().obstacle(of_store, D1) is Obstacle.PREFILL_NOT_DIRECT


def test_workers_that_hand_nothing_over_directly_use_the_store() -> None:
    workers = [replace(worker, direct=False, stores=True) for worker in (P1, D1)]
    route = RequestRoute(10, ways=Direct())
    assert route.options(workers) == {"p1": Stage.PREFILL}
    assert [found for *_, found in route.obstacles(workers)] == [Obstacle.PREFILL_NOT_DIRECT]


def test_handed_kv_goes_to_who_can_load_it() -> None:
    p1, d1 = (replace(worker, stores=True, direct=False) for worker in (P1, D1))
    route = RequestRoute(10, ways=Direct())
    route.begin(p1, Stage.PREFILL)
    commit = KVCommit(epoch=1, kv_namespace="ns", num_tokens=0, objects=[], connector="S")
    assert say(route, "p1", entry(0, 11, commit=commit)) == ([11], [Outcome.HANDED_OVER])
    assert route.options([p1, d1, D2]) == {"d1": Stage.DECODE}
    assert route.options([p1, D2]) == {"d2": Stage.DECODE}


class Client:
    """Runs a route over scripted workers; token p of every output is 100 + p."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.route = RequestRoute(max_tokens, max_failures=100, ways=Ways())
        self.seen: list[int] = []
        self.ended = False
        self.attempts: list[Attempt] = []
        self.begin()

    def begin(self) -> None:
        """A pair while it is allowed, then decode alone."""
        self.route.forgive()
        options = self.route.options([P1, D1, P2, D2])
        self.taken_over = 0
        workers = {worker.key: worker for worker in (P1, P2, D1, D2)}
        key, stage = next(iter(options.items()))
        partner = None
        if stage is Stage.PAIR:
            partner = workers[next(iter(self.route.partners([D1, D2], workers[key])))]
        self.attempts.append(self.route.begin(workers[key], stage, partner))

    def hear(self, key: str, said: Entry) -> None:
        for step in self.route.steps(key, said):
            assert not (self.ended and step.released), "nothing follows the end"
            self.seen += tokens([step])
            self.taken_over += step.outcome is Outcome.TAKEN_OVER
            self.ended |= step.outcome is Outcome.FINISHED
        assert self.taken_over <= 1


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode", "lose prefill", "lose decode", "error"]),
            st.integers(0, 8),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=40,
    ),
)
def test_the_client_gets_each_position_once_and_in_order_whatever_workers_say(
    max_tokens: int, events: list[tuple[str, int, int, int]]
) -> None:
    client = Client(max_tokens)
    for kind, position, count, age in events:
        attempt = client.attempts[max(0, len(client.attempts) - 1 - age)]
        prefill, decode = attempt.keys[0], attempt.keys[-1]
        if kind.startswith("lose"):
            client.route.on_lost(prefill if kind == "lose prefill" else decode, "gone")
        elif kind == "error":
            client.hear(
                decode, entry(position, epoch=attempt.epoch, handoff_failed="the read failed")
            )
        else:
            first = len(attempt.output_token_ids)
            if kind == "decode":
                first += position
                count = min(count, max(0, max_tokens - first))
            else:
                count = min(1, max_tokens - first)
            last = first + count == max_tokens and count > 0
            reason = FinishReason.LENGTH if last else FinishReason.UNSPECIFIED
            said = range(100 + first, 100 + first + count)
            key = prefill if kind == "prefill" else decode
            client.hear(key, entry(first, *said, epoch=attempt.epoch, finish_reason=reason))
        if client.ended:
            break
        if client.route.attempt is None:
            client.begin()
    assert client.seen == list(range(100, 100 + len(client.seen)))
    assert not client.ended or len(client.seen) == max_tokens


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 9), st.data())
def test_every_interleaving_of_prefill_and_decode_gives_the_whole_answer(
    max_tokens: int, data: st.DataObject
) -> None:
    client = Client(max_tokens)
    ends = FinishReason.LENGTH
    from_prefill = [entry(0, 100), entry(1)]
    from_decode = [
        entry(a, *range(100 + a, 100 + b), finish_reason=ends if b == max_tokens else 0)
        for a, b in pairwise(range(1, max_tokens + 1))
    ]
    queues = {"p1": from_prefill, "d1": from_decode}
    while any(queues.values()):
        key = data.draw(st.sampled_from([key for key, queue in queues.items() if queue]))
        client.hear(key, queues[key].pop(0))
    assert client.ended
    assert client.seen == list(range(100, 100 + max_tokens))
