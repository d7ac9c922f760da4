"""Where one request is: who computes it and what the client has. Pure: no time and no I/O.

A request is a chain of *attempts*, each with its own epoch: prefill with hand-off, decode on handed
KV, or one worker alone. Whatever a worker says under another epoch than the current one is dropped.
Positions are released in order, each once, so that an attempt may repeat or resume freely.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from diptych.engine.request import FinishReason, KVCommit, TokenLogprobs

MAX_FAILURES = 5


class Role(enum.IntEnum):
    """What a worker is for; the numbers are those of `diptych.v1.Role`."""

    UNSPECIFIED = 0
    PREFILL = 1
    DECODE = 2
    AGGREGATED = 3

    @classmethod
    def _missing_(cls, value: object) -> Role:
        """A role of a later version: such a worker gets no requests."""
        return cls.UNSPECIFIED


class Stage(enum.Enum):
    """What an attempt is to do."""

    PREFILL = "prefill"
    """Read the prompt, sample token 1, hand the KV over."""
    DECODE = "decode"
    """Continue on handed KV."""
    WHOLE = "whole"
    """Do all that is left on one worker."""


class RoutableWorker(Protocol):
    """What routing needs to know of a worker. `key` is new with every incarnation."""

    @property
    def key(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def kv_namespace(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request to one worker."""

    worker_key: str
    stage: Stage
    epoch: int
    output_token_ids: tuple[int, ...]
    commit: KVCommit | None


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


class Outcome(enum.Enum):
    """What follows from an entry."""

    CONTINUE = "continue"
    STALE = "stale"
    HANDED_OVER = "handed over"
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
    """Result of `on_entry`; `released` is None where the client gets nothing."""

    outcome: Outcome
    released: Released | None


class RequestRoute:
    """The state of one request between attempts and within one."""

    def __init__(self, max_tokens: int, max_failures: int = MAX_FAILURES) -> None:
        self._max_tokens = max_tokens
        self._failures_left = max_failures
        self._epoch = 0
        self._attempt: Attempt | None = None
        self._tokens: list[int] = []
        self._commit: KVCommit | None = None
        self._commit_namespace = ""
        self._namespace = ""
        self._num_cached_tokens = 0
        self._prompt_logprobs_sent = False
        self._excluded: set[str] = set()
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
    def exhausted(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._failures_left < 0

    @property
    def reason(self) -> str:
        """Why the last attempt failed."""
        return self._reason

    def options(self, workers: Iterable[RoutableWorker]) -> dict[str, Stage]:
        """Workers that may take the next attempt, by key, with what each would do."""
        keys: dict[Role, list[str]] = {role: [] for role in Role}
        for worker in workers:
            if worker.key not in self._excluded:
                keys[worker.role].append(worker.key)
        prefill, decode, both = keys[Role.PREFILL], keys[Role.DECODE], keys[Role.AGGREGATED]
        if self._commit is not None and decode:
            return dict.fromkeys(decode, Stage.DECODE)
        if not self._tokens and ((prefill and decode) or both):
            split = prefill if decode else []
            return dict.fromkeys(split, Stage.PREFILL) | dict.fromkeys(both, Stage.WHOLE)
        return dict.fromkeys(both or decode or prefill, Stage.WHOLE)

    def begin(self, worker: RoutableWorker, stage: Stage) -> Attempt:
        """Start the next attempt, under a new epoch, on a worker that `options` gave."""
        self._epoch += 1
        commit = self._commit if stage is Stage.DECODE else None
        if commit is not None and worker.kv_namespace != self._commit_namespace:
            commit = None
        self._namespace = worker.kv_namespace
        self._attempt = Attempt(
            worker_key=worker.key,
            stage=stage,
            epoch=self._epoch,
            output_token_ids=tuple(self._tokens),
            commit=commit,
        )
        return self._attempt

    def fail(self, reason: str) -> None:
        """The current attempt came to nothing: its worker is left out of the next one."""
        if self._attempt is not None:
            self._excluded.add(self._attempt.worker_key)
        self._attempt = None
        self._failures_left -= 1
        self._reason = reason

    def forgive(self) -> None:
        """Let workers that failed before take part again."""
        self._excluded.clear()

    def on_entry(self, worker_key: str, entry: Entry) -> Step:
        """Take what a worker says; the outcome tells whether the attempt goes on."""
        attempt = self._attempt
        if attempt is None or attempt.worker_key != worker_key or attempt.epoch != entry.epoch:
            return Step(Outcome.STALE, None)
        if entry.first_position > len(self._tokens) and entry.token_ids:
            self.fail(f"tokens before position {entry.first_position} are missing")
            return Step(Outcome.LOST, None)
        if entry.error is not None or entry.finish_reason in _NO_ANSWER:
            self.fail(entry.error or "the worker aborted the request")
            return Step(Outcome.LOST, None)
        outcome = self._outcome(attempt, entry)
        released = self._release(attempt, entry, ends=outcome is Outcome.FINISHED)
        if outcome in (Outcome.FINISHED, Outcome.HANDED_OVER):
            self._attempt = None
        return Step(outcome, released)

    def _outcome(self, attempt: Attempt, entry: Entry) -> Outcome:
        num_tokens = max(len(self._tokens), entry.first_position + len(entry.token_ids))
        ends = entry.finish_reason is FinishReason.STOP or (
            entry.finish_reason is FinishReason.LENGTH
            # a prefill worker that stops to hand over is not at the request's limit
            and (attempt.stage is not Stage.PREFILL or num_tokens >= self._max_tokens)
        )
        if ends:
            return Outcome.FINISHED
        if attempt.stage is Stage.PREFILL:
            if entry.commit is not None:
                self._commit, self._commit_namespace = entry.commit, self._namespace
            if self._commit is not None and num_tokens:
                return Outcome.HANDED_OVER
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
