"""The routing state of a request, event by event."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.request import FinishReason, KVCommit, KVObject, TokenLogprobs
from diptych.services.router.routable import Role
from diptych.services.router.route import Entry, Outcome, RequestRoute, Stage

PAGE = KVObject(key=b"k" * 32, start_token=0, end_token=5, checksum=1, num_bytes=9)
COMMIT = KVCommit(
    epoch=1, kv_namespace="salted", num_tokens=5, objects=[PAGE], connector="S", num_cached_tokens=4
)


@dataclass(frozen=True)
class Worker:
    key: str
    role: Role
    kv_namespace: str = "ns"
    incarnation: str = "1"
    direct: bool = False
    stores: bool = True
    follows: bool = False

    def reads(self, incarnation: str) -> float | None:
        return None


P1, P2 = Worker("p1", Role.PREFILL), Worker("p2", Role.PREFILL)
D1, D2 = Worker("d1", Role.DECODE), Worker("d2", Role.DECODE)
A1 = Worker("a1", Role.AGGREGATED)
LATER = Worker("x1", Role(9))  # of a version that has more roles


def entry(epoch: int, position: int, *token_ids: int, **fields: Any) -> Entry:
    return Entry(epoch=epoch, first_position=position, token_ids=list(token_ids), **fields)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([P1, D1], {"p1": Stage.PREFILL}),
        ([P1, P2, D1], {"p1": Stage.PREFILL, "p2": Stage.PREFILL}),
        ([A1], {"a1": Stage.WHOLE}),
        ([P1, D1, A1], {"p1": Stage.PREFILL, "a1": Stage.WHOLE}),
        ([P1, A1], {"a1": Stage.WHOLE}),
        ([D1, D2], {"d1": Stage.WHOLE, "d2": Stage.WHOLE}),
        ([P1], {"p1": Stage.WHOLE}),
        ([LATER, D1], {"d1": Stage.WHOLE}),
        ([LATER], {}),
        ([], {}),
    ],
)
def test_a_new_request_takes_a_complete_path_or_whoever_there_is(
    workers: list[Worker], expected: dict[str, Stage]
) -> None:
    assert RequestRoute(max_tokens=10).options(workers) == expected


def handed_over(max_tokens: int = 10) -> RequestRoute:
    """A request whose token 1 and commit have come from p1."""
    route = RequestRoute(max_tokens)
    route.begin(P1, Stage.PREFILL)
    assert route.on_entry("p1", entry(1, 0, 11)).outcome is Outcome.CONTINUE
    assert route.on_entry("p1", entry(1, 1, commit=COMMIT)).outcome is Outcome.HANDED_OVER
    return route


def test_the_hand_off_goes_to_decode_with_token_1_and_the_commit() -> None:
    route = handed_over()
    assert route.options([P1, P2, D1, D2, A1]) == {"d1": Stage.DECODE, "d2": Stage.DECODE}
    attempt = route.begin(D1, Stage.DECODE)
    assert (attempt.epoch, attempt.output_token_ids, attempt.commit) == (2, (11,), COMMIT)


def test_a_commit_before_token_1_waits_for_it() -> None:
    route = RequestRoute(10)
    route.begin(P1, Stage.PREFILL)
    assert route.on_entry("p1", entry(1, 0, commit=COMMIT)).outcome is Outcome.CONTINUE
    step = route.on_entry("p1", entry(1, 0, 11))
    assert step.outcome is Outcome.HANDED_OVER
    assert step.released is not None
    assert step.released.num_cached_tokens == 4


def test_a_commit_that_names_no_objects_leads_nowhere() -> None:
    route = RequestRoute(10)
    route.begin(P1, Stage.PREFILL)
    route.on_entry("p1", entry(1, 0, 11))
    nowhere = KVCommit(epoch=1, kv_namespace="ns", num_tokens=5, objects=[], connector="D")
    assert route.on_entry("p1", entry(1, 1, commit=nowhere)).outcome is Outcome.LOST
    assert route.options([P1, D1]) == {"d1": Stage.WHOLE}


def test_a_decode_worker_of_another_namespace_recomputes() -> None:
    route = handed_over()
    other = Worker("d3", Role.DECODE, kv_namespace="other")
    assert route.begin(other, Stage.DECODE).commit is None


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_token_1_may_be_the_end(reason: FinishReason) -> None:
    route = RequestRoute(max_tokens=1)
    route.begin(P1, Stage.PREFILL)
    step = route.on_entry("p1", entry(1, 0, 11, finish_reason=reason))
    assert step.outcome is Outcome.FINISHED
    assert step.released is not None
    assert step.released.finish_reason is reason
    assert route.attempt is None


def test_a_prefill_that_stops_to_hand_over_does_not_end_the_request() -> None:
    route = RequestRoute(max_tokens=10)
    route.begin(P1, Stage.PREFILL)
    step = route.on_entry("p1", entry(1, 0, 11, finish_reason=FinishReason.LENGTH))
    assert step.outcome is Outcome.CONTINUE


def test_a_lost_prefill_is_retried_on_another_under_a_new_epoch() -> None:
    route = RequestRoute(10)
    route.begin(P1, Stage.PREFILL)
    route.fail("gone")
    assert route.options([P1, P2, D1]) == {"p2": Stage.PREFILL}
    assert route.begin(P2, Stage.PREFILL).epoch == 2
    assert route.on_entry("p1", entry(1, 0, 11)).outcome is Outcome.STALE
    assert route.on_entry("p2", entry(1, 0, 11)).outcome is Outcome.STALE


def test_a_prefill_lost_after_token_1_leaves_the_rest_to_another_or_to_decode() -> None:
    route = RequestRoute(10)
    route.begin(P1, Stage.PREFILL)
    route.on_entry("p1", entry(1, 0, 11))
    route.fail("gone")
    assert route.options([P1, D1]) == {"d1": Stage.WHOLE}
    assert route.options([P1, P2, D1]) == {"p2": Stage.PREFILL}
    assert route.begin(P2, Stage.PREFILL).output_token_ids == (11,)
    assert route.on_entry("p2", entry(2, 1, 12)).outcome is Outcome.CONTINUE
    assert route.on_entry("p2", entry(2, 2, commit=COMMIT)).outcome is Outcome.HANDED_OVER
    assert route.begin(D1, Stage.DECODE).output_token_ids == (11, 12)


def test_a_commit_waits_for_the_token_of_its_own_attempt() -> None:
    route = RequestRoute(10)
    route.begin(P1, Stage.PREFILL)
    route.on_entry("p1", entry(1, 0, 11))
    route.fail("gone")
    route.begin(P2, Stage.PREFILL)
    assert route.on_entry("p2", entry(2, 1, commit=COMMIT)).outcome is Outcome.CONTINUE
    assert route.on_entry("p2", entry(2, 1, 12)).outcome is Outcome.HANDED_OVER


def test_a_lost_decode_keeps_the_commit_and_what_was_sent() -> None:
    route = handed_over()
    route.begin(D1, Stage.DECODE)
    route.on_entry("d1", entry(2, 1, 12, 13))
    route.fail("gone")
    assert route.options([P1, D1, D2]) == {"d2": Stage.DECODE}
    attempt = route.begin(D2, Stage.DECODE)
    assert (attempt.epoch, attempt.output_token_ids) == (3, (11, 12, 13))
    assert attempt.commit == COMMIT
    route.fail("gone too")
    assert route.options([P1, D1, D2]) == {"p1": Stage.WHOLE}


@pytest.mark.parametrize(
    "bad",
    [
        {"error": "the engine died"},
        {"finish_reason": FinishReason.ERROR},
        {"finish_reason": FinishReason.ABORT},
    ],
)
def test_an_attempt_that_fails_at_its_worker_is_lost(bad: dict[str, Any]) -> None:
    route = RequestRoute(10)
    route.begin(A1, Stage.WHOLE)
    assert route.on_entry("a1", entry(1, 0, **bad)).outcome is Outcome.LOST
    assert route.options([A1]) == {}
    route.forgive()
    assert route.options([A1]) == {"a1": Stage.WHOLE}


def test_a_gap_in_positions_is_a_loss() -> None:
    route = RequestRoute(10)
    route.begin(A1, Stage.WHOLE)
    assert route.on_entry("a1", entry(1, 1, 12)).outcome is Outcome.LOST


def test_failures_are_bounded() -> None:
    route = RequestRoute(10, max_failures=2)
    for _ in range(3):
        assert not route.exhausted
        route.begin(A1, Stage.WHOLE)
        route.fail("gone")
    assert route.exhausted


def test_logprobs_of_repeated_positions_are_cut_too() -> None:
    route = RequestRoute(10)
    route.begin(A1, Stage.WHOLE)
    route.on_entry("a1", entry(1, 0, 11))
    packed = TokenLogprobs(width=2, token_ids=[1, 2, 3, 4], logprobs=[-1, -2, -3, -4], ranks=[1, 2])
    step = route.on_entry("a1", entry(1, 0, 11, 12, logprobs=packed))
    assert step.released is not None
    assert step.released.logprobs == TokenLogprobs(
        width=2, token_ids=[3, 4], logprobs=[-3, -4], ranks=[2]
    )
    assert (step.released.first_position, step.released.token_ids) == (1, [12])


def packed(*token_ids: int) -> TokenLogprobs:
    return TokenLogprobs(width=len(token_ids), token_ids=[*token_ids], logprobs=[], ranks=[1])


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (entry(1, 0, 384), "outside the vocabulary of 384"),
        (entry(1, 0, 5, 2**32 - 1), "outside the vocabulary of 384"),
        (entry(1, 0, 5, logprobs=packed(5, 384)), "outside the vocabulary of 384"),
        (entry(1, 0, prompt_logprobs=packed(384)), "outside the vocabulary of 384"),
        (entry(1, 0, *range(11)), "more than 10 tokens"),
        (entry(1, 0, *range(11), finish_reason=FinishReason.STOP), "more than 10 tokens"),
        (entry(1, 9, 5, 6), "more than 10 tokens"),
        (entry(1, 2**32 - 1, 5), "more than 10 tokens"),
    ],
)
def test_a_worker_that_invents_tokens_is_at_fault(said: Entry, fault: str) -> None:
    route = RequestRoute(10, vocab_size=384)
    route.begin(A1, Stage.WHOLE)
    step = route.on_entry("a1", said)
    assert (step.outcome, step.released) == (Outcome.LOST, None)
    assert route.reason.startswith("a1 gave")
    assert fault in route.reason
    assert not route.options([A1]), "it is not asked again"


def test_all_tokens_of_the_vocabulary_and_of_the_limit_are_taken() -> None:
    route = RequestRoute(3, vocab_size=384)
    route.begin(A1, Stage.WHOLE)
    few = packed(0, 383, 2**32 - 1)  # one alternative, where two were asked for
    step = route.on_entry("a1", entry(1, 0, 0, 383, 5, logprobs=few))
    assert step.released is not None
    assert step.released.token_ids == [0, 383, 5]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("say"), st.integers(0, 12), st.integers(0, 4), st.integers(1, 6)),
            st.tuples(st.just("lose"), st.just(0), st.just(0), st.just(0)),
        ),
        max_size=40,
    )
)
def test_positions_are_released_in_order_each_once(events: list[tuple[str, int, int, int]]) -> None:
    """Whatever workers say under whatever epoch, the client gets 0, 1, 2, … each once."""
    route = RequestRoute(1000, max_failures=100)
    seen: list[int] = []
    epochs = [route.begin(A1, Stage.WHOLE).epoch]
    for kind, position, count, epoch in events:
        if kind == "lose":
            route.fail("gone")
        else:
            # token p of every true output is 100 + p
            tokens = range(100 + position, 100 + position + count)
            step = route.on_entry("a1", entry(epoch, position, *tokens))
            if step.released is not None:
                assert epoch == epochs[-1]
                seen.extend(step.released.token_ids)
        if route.attempt is None:
            epochs.append(route.begin(A1, Stage.WHOLE).epoch)
    assert seen == list(range(100, 100 + len(seen)))
    assert all(later == earlier + 1 for earlier, later in pairwise(epochs))


FOLLOWER, SECOND = (
    Worker("d1", Role.DECODE, follows=True),
    Worker("d2", Role.DECODE, follows=True),
)


def followed(num_prompt_tokens: int = 5, max_tokens: int = 10) -> RequestRoute:
    """A request whose token 1 has come from p1, and which d1 follows."""
    route = RequestRoute(max_tokens)
    route.begin(P1, Stage.PREFILL)
    assert route.followers([FOLLOWER]) == {}, "there is nothing to go on with"
    assert route.on_entry("p1", entry(1, 0, 11)).outcome is Outcome.CONTINUE
    assert route.followers([P2, FOLLOWER, D2, A1]) == {"d1": Stage.DECODE}
    part = route.follow("d1", num_prompt_tokens, "StoreConnector")
    assert (part.stage, part.epoch, part.output_token_ids) == (Stage.DECODE, 1, (11,))
    assert part.commit is not None
    assert part.commit.pending
    assert not part.commit.objects
    assert part.commit.num_tokens == num_prompt_tokens
    assert route.attempt is not None
    assert route.attempt.keys == ("p1", "d1")
    assert route.followers([SECOND]) == {}, "one is enough"
    return route


def test_a_follower_of_another_namespace_or_an_older_version_is_none() -> None:
    route = RequestRoute(max_tokens=10)
    route.begin(P1, Stage.PREFILL)
    route.on_entry("p1", entry(1, 0, 11))
    other = Worker("d3", Role.DECODE, kv_namespace="other", follows=True)
    assert route.followers([D1, other]) == {}


def test_a_follower_goes_on_whether_or_not_the_commit_came_before() -> None:
    route = followed()
    assert route.awaits_handoff
    assert route.on_entry("p1", entry(1, 1, commit=COMMIT)).outcome is Outcome.STORED
    assert route.awaits_handoff
    step = route.on_entry("d1", entry(1, 1, 12))
    assert (step.outcome, step.released and step.released.token_ids) == (Outcome.TAKEN_OVER, [12])
    assert not route.awaits_handoff
    assert route.on_entry("d1", entry(1, 2, 13, finish_reason=FinishReason.STOP)).outcome is (
        Outcome.FINISHED
    )

    route = followed()
    assert route.on_entry("d1", entry(1, 1, 12)).outcome is Outcome.TAKEN_OVER
    assert route.on_entry("p1", entry(1, 1, commit=COMMIT)).outcome is Outcome.STORED
    # which whoever comes after d1 may load
    assert route.on_lost("d1", "gone")
    assert route.options([P2, FOLLOWER, SECOND]) == {"d2": Stage.DECODE}
    assert route.begin(SECOND, Stage.DECODE).commit == COMMIT


def test_a_commit_that_is_short_of_the_prompt_begins_the_follower_anew() -> None:
    """It would wait for what never comes."""
    route = followed(num_prompt_tokens=6)
    assert route.on_entry("p1", entry(1, 1, commit=COMMIT)).outcome is Outcome.HANDED_OVER
    assert route.options([P2, FOLLOWER]) == {"d1": Stage.DECODE}
    attempt = route.begin(FOLLOWER, Stage.DECODE)
    assert (attempt.epoch, attempt.commit, attempt.output_token_ids) == (2, COMMIT, (11,))
    assert route.on_entry("d1", entry(1, 1, 12)).outcome is Outcome.STALE


def test_a_prefill_that_is_lost_is_missed_until_its_kv_is_stored_or_taken() -> None:
    route = followed()
    assert route.on_lost("p1", "gone")
    assert route.attempt is None
    assert route.options([P1, P2, FOLLOWER]) == {"p2": Stage.PREFILL}

    route = followed()
    route.on_entry("p1", entry(1, 1, commit=COMMIT))
    assert not route.on_lost("p1", "gone")

    route = followed()
    route.on_entry("d1", entry(1, 1, 12))
    assert not route.on_lost("p1", "gone")
    assert route.on_entry("p1", entry(1, 1, error="late")).outcome is Outcome.STALE


def test_a_follower_that_is_lost_or_silent_is_left_out_of_what_comes_next() -> None:
    for with_commit in (False, True):
        route = followed()
        if with_commit:
            route.on_entry("p1", entry(1, 1, commit=COMMIT))
        assert route.on_lost("d1", "gone")
        stage = Stage.DECODE if with_commit else Stage.PREFILL
        assert route.options([P1, FOLLOWER, SECOND]) == (
            {"d2": stage} if with_commit else {"p1": stage}
        )
    route = followed()
    route.on_entry("p1", entry(1, 1, commit=COMMIT))
    route.fail("nothing came")
    assert route.options([FOLLOWER, SECOND]) == {"d2": Stage.DECODE}


def test_a_follower_that_refuses_leaves_its_prefill_as_it_was() -> None:
    route = followed()
    route.unfollow()
    assert route.on_entry("p1", entry(1, 1, commit=COMMIT)).outcome is Outcome.HANDED_OVER
    assert route.options([FOLLOWER]) == {"d1": Stage.DECODE}


def test_a_follower_that_ends_at_once_has_finished() -> None:
    route = followed(max_tokens=2)
    step = route.on_entry("d1", entry(1, 1, 12, finish_reason=FinishReason.LENGTH))
    assert step.outcome is Outcome.FINISHED
