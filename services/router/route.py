"""Where one request is: who computes it and what the client has. Pure: no time and no I/O.

A request is a chain of *attempts*, each with its own epoch: prefill with hand-off, decode on handed
KV, one worker alone, or a *pair*: prefill and decode at once, decode reading prefill's memory. With
token 1 a prefill may get a *follower*: decode, which loads from the store what prefill has stored
already, under the same epoch.
Whatever a worker says under another epoch than the current one is dropped. Positions are released
in order, each once, so that an attempt may repeat or resume freely.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.connectors.store_settings import NAME as STORE_CONNECTOR
from diptych.engine.request import FinishReason, KVCommit, TokenLogprobs
from diptych.services.router.routable import Role, RoutableWorker
from diptych.services.router.ways import HandoffWays, Obstacle, StoreOnly
from diptych.text.output_processor import UNUSED_TOKEN_ID

MAX_FAILURES = 5
MAX_PAIR_FAILURES = 2


class Stage(enum.Enum):
    """What an attempt is to do."""

    PREFILL = "prefill"
    """Read the prompt, sample token 1, hand the KV over."""
    DECODE = "decode"
    """Continue on handed KV."""
    WHOLE = "whole"
    """Do all that is left on one worker."""
    PAIR = "pair"
    """Prefill and decode at once: decode reads the KV from prefill as it is computed."""
    FOLLOWED = "followed"
    """Prefill has sampled token 1 and stores the KV, decode loads it as it is stored."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request to one worker; of a pair, to `worker_key` as prefill and to
    `decode_key`."""

    worker_key: str
    stage: Stage
    epoch: int
    output_token_ids: tuple[int, ...]
    commit: KVCommit | None
    decode_key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The workers it runs on."""
        return (self.worker_key,) if self.decode_key is None else (self.worker_key, self.decode_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one frame of a worker says about one request."""

    epoch: int
    first_position: int
    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.UNSPECIFIED
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    commit: KVCommit | None = None
    error: str | None = None
    handoff_failed: str | None = None


class Outcome(enum.Enum):
    """What follows from an entry."""

    CONTINUE = "continue"
    STALE = "stale"
    HANDED_OVER = "handed over"
    TAKEN_OVER = "taken over"
    """The decode worker of a pair goes on by itself: prefill's part is over."""
    STORED = "stored"
    """The prefill of a followed attempt has stored the KV: its part is over."""
    FINISHED = "finished"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """New positions for the client, and the end where it is one."""

    first_position: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    finish_reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int


class Step(NamedTuple):
    """Result of `on_entry`; `released` is None where the client gets nothing. `steps` says whose
    entry it follows from: of a pair that need not be the worker that spoke last."""

    outcome: Outcome
    released: Released | None
    worker_key: str = ""


class RequestRoute:
    """The state of one request between attempts and within one."""

    def __init__(
        self,
        max_tokens: int,
        max_failures: int = MAX_FAILURES,
        ways: HandoffWays | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` None: token ids are not looked at."""
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._failures_left = max_failures
        self._ways = ways or StoreOnly()
        self._epoch = 0
        self._attempt: Attempt | None = None
        self._tokens: list[int] = []
        self._commit: KVCommit | None = None
        self._commit_namespace = ""
        self._namespace = ""
        self._num_cached_tokens = 0
        self._prompt_logprobs_sent = False
        self._excluded: set[str] = set()
        self._failed_pairs: set[tuple[str, ...]] = set()
        self._early: dict[int, Entry] = {}
        self._taken_over = False
        self._left_to_store = False
        self._stored = False
        self._num_followed = 0
        self._reason = "no worker took the request"

    @property
    def attempt(self) -> Attempt | None:
        """The current attempt; None between attempts."""
        return self._attempt

    @property
    def num_tokens(self) -> int:
        """Output tokens released so far."""
        return len(self._tokens)

    @property
    def has_begun(self) -> bool:
        """Whether a worker has accepted the request once."""
        return self._epoch > 0

    @property
    def awaits_token(self) -> bool:
        """Whether the current attempt has given no token yet."""
        return self._attempt is not None and self._num_given(self._attempt) == len(self._tokens)

    @property
    def awaits_handoff(self) -> bool:
        """Whether prefill's token is out and the next must come from another worker."""
        attempt = self._attempt
        if attempt is None or self.awaits_token:
            return False
        return attempt.stage is Stage.PREFILL or (
            attempt.decode_key is not None and not self._taken_over
        )

    def kv_arrived(self, attempt: Attempt) -> bool:
        """Whether decode has gone on from the KV of an attempt, which may be over."""
        if attempt.decode_key is not None:
            return self._taken_over
        return attempt.stage is Stage.DECODE and len(self._tokens) > self._num_given(attempt)

    @property
    def exhausted(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._failures_left < 0

    @property
    def reason(self) -> str:
        """Why the last attempt failed."""
        return self._reason

    def options(self, workers: Iterable[RoutableWorker]) -> dict[str, Stage]:
        """Workers that may take the next attempt, by key, with what each would do. One that would
        be the prefill of a pair has `partners`."""
        workers = list(workers)
        prefill, decode, both = (
            [w for w in workers if w.role is role and w.key not in self._excluded]
            for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
        )
        if self._commit is not None and decode:
            readers = [worker for worker in decode if worker.stores]
            return {worker.key: Stage.DECODE for worker in readers or decode}
        stored = [w for w in prefill if w.stores] if any(w.stores for w in decode) else []
        # KV that could not be read from memory is taken from the store, where there is one
        paired = [] if self._failed_pairs and stored else self._paired(prefill, decode)
        split = {worker.key: Stage.PAIR for worker in paired}
        split = split or {worker.key: Stage.PREFILL for worker in stored}
        alone = both if split else both or decode or prefill
        return split | {worker.key: Stage.WHOLE for worker in alone}

    def _paired(
        self, prefill: list[RoutableWorker], decode: list[RoutableWorker]
    ) -> list[RoutableWorker]:
        return [worker for worker in prefill if any(self._partners(decode, worker))]

    def obstacles(
        self, workers: Iterable[RoutableWorker]
    ) -> Iterator[tuple[RoutableWorker, RoutableWorker, Obstacle]]:
        """Prefill and decode workers that are no pair, with why, but for what failed before."""
        workers = list(workers)
        for prefill in (w for w in workers if w.role is Role.PREFILL):
            for decode in (w for w in workers if w.role is Role.DECODE):
                found = self._ways.obstacle(prefill, decode)
                if found is not None:
                    yield prefill, decode, found

    def partners(
        self, workers: Iterable[RoutableWorker], prefill: RoutableWorker
    ) -> dict[str, Stage]:
        """Decode workers that may make a pair with `prefill`, in the form of `options`."""
        return {worker.key: Stage.DECODE for worker in self._partners(workers, prefill)}

    def _partners(
        self, workers: Iterable[RoutableWorker], prefill: RoutableWorker
    ) -> Iterator[RoutableWorker]:
        """One after another: whether there is one is asked of each prefill worker."""
        if len(self._failed_pairs) >= MAX_PAIR_FAILURES:
            return
        for worker in workers:
            if (
                worker.role is Role.DECODE
                and worker.key not in self._excluded
                and worker.kv_namespace == prefill.kv_namespace
                and (prefill.key, worker.key) not in self._failed_pairs
                and self._ways.obstacle(prefill, worker) is None
            ):
                yield worker

    def begin(
        self, worker: RoutableWorker, stage: Stage, partner: RoutableWorker | None = None
    ) -> Attempt:
        """Start the next attempt, under a new epoch, on a worker that `options` gave; a pair with a
        partner that `partners` gave."""
        self._epoch += 1
        commit = self._commit if stage is Stage.DECODE else None
        if commit is not None and worker.kv_namespace != self._commit_namespace:
            commit = None
        self._namespace = worker.kv_namespace
        self._early.clear()
        self._taken_over = self._left_to_store = self._stored = False
        self._attempt = Attempt(
            worker_key=worker.key,
            stage=stage,
            epoch=self._epoch,
            output_token_ids=tuple(self._tokens),
            commit=commit,
            decode_key=None if partner is None else partner.key,
        )
        return self._attempt

    def followers(self, workers: Iterable[RoutableWorker]) -> dict[str, Stage]:
        """Decode workers that may follow the current attempt, in the form of `options`: its prefill
        has sampled its token, and stores the KV."""
        attempt = self._attempt
        if attempt is None or attempt.stage is not Stage.PREFILL or self.awaits_token:
            return {}
        return {
            worker.key: Stage.DECODE
            for worker in workers
            if worker.role is Role.DECODE
            and worker.follows
            and worker.key not in self._excluded
            and worker.kv_namespace == self._namespace
        }

    def follow(self, worker_key: str, num_prompt_tokens: int, connector: str) -> Attempt:
        """One that `followers` gave follows the current attempt; returns its own part."""
        attempt = self._attempt
        assert attempt is not None
        self._num_followed = num_prompt_tokens
        self._attempt = replace(attempt, stage=Stage.FOLLOWED, decode_key=worker_key)
        return Attempt(
            worker_key=worker_key,
            stage=Stage.DECODE,
            epoch=attempt.epoch,
            output_token_ids=tuple(self._tokens),
            commit=KVCommit(
                epoch=attempt.epoch,
                kv_namespace="",
                num_tokens=num_prompt_tokens,
                objects=[],
                connector=connector,
                num_cached_tokens=self._num_cached_tokens,
                pending=True,
            ),
        )

    def unfollow(self) -> None:
        """The follower did not take its part: its prefill goes on as before."""
        attempt = self._attempt
        assert attempt is not None
        self._attempt = replace(attempt, stage=Stage.PREFILL, decode_key=None)

    def fail(self, reason: str, worker_key: str | None = None) -> None:
        """The current attempt came to nothing; its worker is left out of the next one. Of a pair it
        is the worker that is named; without a name the two are no pair again."""
        attempt = self._attempt
        if attempt is not None and attempt.stage is Stage.PAIR and worker_key is None:
            self._failed_pairs.add(attempt.keys)
        elif attempt is not None:
            late = attempt.decode_key if self._stored else None
            self._excluded.add(worker_key or late or attempt.worker_key)
        self._attempt = None
        self._failures_left -= 1
        self._reason = reason

    def forgive(self) -> None:
        """Let workers that failed before take part again."""
        self._excluded.clear()

    def on_lost(self, worker_key: str, reason: str) -> bool:
        """A worker will say no more; whether the attempt is lost by that. The prefill of a pair is
        not missed once decode has taken over, or can go on from the store."""
        attempt = self._attempt
        if attempt is None or worker_key not in attempt.keys:
            return False
        if self._is_over(attempt, worker_key):
            return False
        self.fail(reason, worker_key)
        return True

    def steps(self, worker_key: str, entry: Entry) -> Iterator[Step]:
        """`on_entry`, and what becomes possible by it of what was said early."""
        yield self.on_entry(worker_key, entry)._replace(worker_key=worker_key)
        while (attempt := self._attempt) is not None and attempt.decode_key is not None:
            ready = [position for position in self._early if position <= len(self._tokens)]
            if not ready:
                return
            early = self.on_entry(attempt.decode_key, self._early.pop(min(ready)))
            yield early._replace(worker_key=attempt.decode_key)

    def on_entry(self, worker_key: str, entry: Entry) -> Step:
        """Take what a worker says; the outcome tells whether the attempt goes on."""
        attempt = self._attempt
        if attempt is None or worker_key not in attempt.keys or attempt.epoch != entry.epoch:
            return Step(Outcome.STALE, None)
        if self._is_over(attempt, worker_key):
            if attempt.stage is Stage.FOLLOWED and self._note_stored(entry):
                return Step(Outcome.STORED, None)
            return Step(Outcome.STALE, None)
        if (fault := self._fault(entry)) is not None:
            self.fail(f"{worker_key} {fault}", worker_key)
            return Step(Outcome.LOST, None)
        if (failure := self._failure(attempt, entry)) is not None:
            self.fail(failure, None if _is_of_both(entry) else worker_key)
            return Step(Outcome.LOST, None)
        if entry.first_position > len(self._tokens):
            if worker_key == attempt.decode_key and len(self._early) <= self._max_tokens:
                # prefill's token 1 is still on its way
                self._early[entry.first_position] = entry
                return Step(Outcome.CONTINUE, None)
            if entry.token_ids:
                self.fail(f"tokens before position {entry.first_position} are missing")
                return Step(Outcome.LOST, None)
        outcome = self._outcome(attempt, worker_key, entry)
        released = self._release(attempt, entry, ends=outcome is Outcome.FINISHED)
        if outcome in (Outcome.FINISHED, Outcome.HANDED_OVER):
            self._attempt = None
        return Step(outcome, released)

    def _fault(self, entry: Entry) -> str | None:
        """What no worker that works says: more than was asked for, or no token of the model."""
        if entry.token_ids and entry.first_position + len(entry.token_ids) > self._max_tokens:
            return f"gave more than {self._max_tokens} tokens"
        if self._vocab_size is None:
            return None
        listed = [packed.token_ids for packed in (entry.logprobs, entry.prompt_logprobs) if packed]
        for token_ids, unused in [
            (entry.token_ids, None),
            *((ids, UNUSED_TOKEN_ID) for ids in listed),
        ]:
            if any(not 0 <= each < self._vocab_size and each != unused for each in token_ids):
                return f"gave a token outside the vocabulary of {self._vocab_size}"
        return None

    @staticmethod
    def _failure(attempt: Attempt, entry: Entry) -> str | None:
        """Why the attempt comes to nothing by this entry; None where it does not."""
        if entry.handoff_failed is not None:
            return f"hand-off: {entry.handoff_failed}"
        if entry.error is not None or entry.finish_reason in _NO_ANSWER:
            return entry.error or "the worker aborted the request"
        commit = entry.commit
        if attempt.stage is Stage.PAIR and commit and not commit.num_tokens:
            return "hand-off: decode did not take the KV"
        stores = attempt.stage in (Stage.PREFILL, Stage.FOLLOWED)
        if stores and commit and commit.num_tokens and not commit.objects:
            return "the commit does not say where the KV lies"
        return None

    @staticmethod
    def _num_given(attempt: Attempt) -> int:
        """Tokens that were out when the attempt began."""
        return len(attempt.output_token_ids)

    def _is_over(self, attempt: Attempt, worker_key: str) -> bool:
        """Whether this is the prefill of a pair whose decode goes on without it: it has all, or
        was sent to the store. If it did not hear so, it will say that the hand-off failed."""
        left = self._stored or (self._left_to_store and not self.awaits_token)
        goes_on = self._taken_over or left
        return goes_on and worker_key == attempt.worker_key

    def _note_stored(self, entry: Entry) -> bool:
        """Keep what an entry says of where the KV lies, if it does."""
        if entry.commit is None:
            return False
        self._commit, self._commit_namespace = entry.commit, self._namespace
        return True

    def _outcome(self, attempt: Attempt, worker_key: str, entry: Entry) -> Outcome:
        hands_over = attempt.stage is Stage.PREFILL or (
            attempt.decode_key is not None and worker_key == attempt.worker_key
        )
        num_tokens = max(len(self._tokens), entry.first_position + len(entry.token_ids))
        ends = entry.finish_reason is FinishReason.STOP or (
            entry.finish_reason is FinishReason.LENGTH
            # a prefill worker that stops to hand over is not at the request's limit
            and (not hands_over or num_tokens >= self._max_tokens)
        )
        if ends:
            return Outcome.FINISHED
        if attempt.stage is Stage.PREFILL:
            self._note_stored(entry)
            if self._commit is not None and num_tokens > self._num_given(attempt):
                return Outcome.HANDED_OVER
        if attempt.stage is Stage.FOLLOWED and not self._taken_over:
            if worker_key == attempt.decode_key:
                self._taken_over = bool(entry.token_ids)
                return Outcome.TAKEN_OVER if self._taken_over else Outcome.CONTINUE
            if entry.commit is not None:
                self._note_stored(entry)
                # what is not in the store the follower would wait for: it begins again, knowing
                self._stored = entry.commit.num_tokens >= self._num_followed
                return Outcome.STORED if self._stored else Outcome.HANDED_OVER
        if attempt.stage is Stage.PAIR and not self._taken_over:
            if worker_key == attempt.decode_key:
                self._taken_over = bool(entry.token_ids)
            elif entry.commit is not None:
                # decode has all of it, unless prefill left it to the store
                self._left_to_store = entry.commit.connector == STORE_CONNECTOR
                self._taken_over = not self._left_to_store
            return Outcome.TAKEN_OVER if self._taken_over else Outcome.CONTINUE
        return Outcome.CONTINUE

    def _count_cached(self, attempt: Attempt, entry: Entry) -> None:
        """Hits of whoever reads the prompt first: what decode loads of the hand-off, or a second
        worker finds of it, was computed for this request."""
        if attempt.stage is not Stage.DECODE and not attempt.output_token_ids:
            of_commit = entry.commit.num_cached_tokens if entry.commit else 0
            cached = max(entry.num_cached_tokens, of_commit)
            self._num_cached_tokens = max(self._num_cached_tokens, cached)

    def _release(self, attempt: Attempt, entry: Entry, *, ends: bool) -> Released | None:
        """The part of an entry that the client does not have yet."""
        repeated = min(len(self._tokens) - entry.first_position, len(entry.token_ids))
        token_ids = entry.token_ids[max(0, repeated) :]
        self._count_cached(attempt, entry)
        prompt_logprobs = None if self._prompt_logprobs_sent else entry.prompt_logprobs
        self._prompt_logprobs_sent |= prompt_logprobs is not None
        if not token_ids and not ends and prompt_logprobs is None:
            return None
        first_position = len(self._tokens)
        self._tokens.extend(token_ids)
        return Released(
            first_position=first_position,
            token_ids=token_ids,
            logprobs=_from_token(entry.logprobs, max(0, repeated)) if token_ids else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=entry.finish_reason if ends else FinishReason.UNSPECIFIED,
            stop_token_id=entry.stop_token_id if ends else None,
            num_cached_tokens=self._num_cached_tokens,
        )


_NO_ANSWER = (FinishReason.ABORT, FinishReason.ERROR)


def _is_of_both(entry: Entry) -> bool:
    """Whether an entry that ends a pair blames the two of them, not its worker."""
    return entry.handoff_failed is not None or entry.commit is not None


def _from_token(packed: TokenLogprobs | None, start: int) -> TokenLogprobs | None:
    """The log probabilities from token `start` of a run on."""
    if packed is None or start == 0:
        return packed
    return TokenLogprobs(
        width=packed.width,
        token_ids=packed.token_ids[start * packed.width :],
        logprobs=packed.logprobs[start * packed.width :],
        ranks=packed.ranks[start:],
    )
