"""A request's life across workers: choose, submit, follow, hand over, and start again when lost.

The state of a request is a `RequestRoute` (pure); this file gives it workers, time and an inbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.clock import Clock
from diptych.connectors.store_settings import NAME as STORE_CONNECTOR
from diptych.connectors.tickets import TicketIssuer
from diptych.engine.request import EngineCoreRequest
from diptych.errors import (
    CapacityError,
    DeadlineError,
    DiptychError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    UnavailableError,
)
from diptych.fault_points import reach
from diptych.proto import worker_pb2
from diptych.services.router.declined import Declined
from diptych.services.router.frames import one_line
from diptych.services.router.inbox import Inbox
from diptych.services.router.membership import Members
from diptych.services.router.metrics import RouterMetrics
from diptych.services.router.paces import Paces
from diptych.services.router.picker import Option, Picker, PickRequest
from diptych.services.router.routable import Role
from diptych.services.router.route import Attempt, Outcome, Released, RequestRoute, Stage, Step
from diptych.services.router.submission import Submission
from diptych.services.router.ways import HandoffWays
from diptych.services.router.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchTimes:
    """Waits of one request, in seconds; the request's own deadline bounds them all.

    `recovery_s` bounds the wait for a worker to come back when none is left for a request that has
    begun; `handoff_s` the time from token 1 to the hand-off's commit.
    """

    first_token_s: float = 120.0
    handoff_s: float = 30.0
    recovery_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Job:
    """One request under way."""

    request: EngineCoreRequest
    route: RequestRoute
    inbox: Inbox
    deadline: float
    links: dict[str, WorkerLink] = field(default_factory=dict)
    prefill_incarnation: str = ""
    token_1_at: float | None = None
    asked_at: float = 0.0
    before_token_1: int = 0

    @property
    def num_tokens(self) -> int:
        """Most it may come to, prompt and output."""
        return len(self.request.prompt_token_ids) + (self.request.sampling_params.max_tokens or 1)


class _Choice(NamedTuple):
    """Who takes the next attempt; `partner` is the decode worker of a pair."""

    link: WorkerLink
    stage: Stage
    partner: WorkerLink | None


class _Refusal(NamedTuple):
    """A worker that did not take its part of an attempt."""

    link: WorkerLink
    error: DiptychError


class Dispatcher:
    """Runs requests on the workers there are."""

    def __init__(
        self,
        members: Members,
        picker: Picker,
        tickets: TicketIssuer,
        clock: Clock,
        metrics: RouterMetrics,
        times: DispatchTimes | None = None,
        ways: HandoffWays | None = None,
        paces: Paces | None = None,
    ) -> None:
        """
        Args:
            ways: how KV may move; through the store alone if absent.
            paces: takes what is measured.
        """
        self._paces = paces or Paces()
        self._ways = ways
        self._members = members
        self._picker = picker
        self._tickets = tickets
        self._clock = clock
        self._metrics = metrics
        self._times = times or DispatchTimes()
        self._declined = Declined(metrics.handoffs_declined)
        self._jobs: set[_Job] = set()
        self._stopping = False

    def stop(self) -> None:
        """End every request, now and from now on, with a `DrainingError`."""
        self._stopping = True
        for job in self._jobs:
            job.inbox.on_lost("", "the router stops")

    @asynccontextmanager
    async def run(
        self, request: EngineCoreRequest, deadline: float, *, vocab_size: int | None = None
    ) -> AsyncIterator[AsyncIterator[Released]]:
        """The request's tokens, in order, each once. Leaving the block early cancels it everywhere.

        Args:
            deadline: on the clock's monotonic time.
            vocab_size: a worker that gives other token ids is at fault; None: any are taken.

        Raises:
            InvalidRequestError: (from the iterator) a worker refuses the request for good.
            CapacityError: every worker's queue is full.
            UnavailableError: there is no worker, or none came back in time.
            DrainingError: the router stops.
            DeadlineError: the deadline passed.
            EngineError: the request failed on every worker that tried.
        """
        max_tokens = request.sampling_params.max_tokens or 1
        job = _Job(
            request=request,
            route=RequestRoute(max_tokens, ways=self._ways, vocab_size=vocab_size),
            inbox=Inbox(max_tokens + 64),
            deadline=deadline,
        )
        self._jobs.add(job)
        try:
            async with aclosing(self._tokens(job)) as tokens:
                yield tokens
        finally:
            self._jobs.remove(job)
            self._cancel(job)

    async def _tokens(self, job: _Job) -> AsyncGenerator[Released, None]:
        while True:
            attempt = await self._begin(job)
            async with aclosing(self._follow(job, attempt)) as steps:
                async for step in steps:
                    if step.released is not None:
                        yield step.released
                    if step.outcome is Outcome.FINISHED:
                        return

    async def _begin(self, job: _Job) -> Attempt:
        """Submit the next attempt; tries workers until one accepts."""
        busy: CapacityError | None = None
        while True:
            self._check_bounds(job, busy)
            choice = self._choose(job)
            if choice is None:
                if busy is not None:
                    raise busy
                await self._await_worker(job)
                continue
            attempt = job.route.begin(*choice)
            refusal = await self._submit(job, choice, attempt)
            if refusal is None:
                return attempt
            link, error = refusal
            if isinstance(error, InvalidRequestError):
                raise error
            if isinstance(error, CapacityError):
                busy = error
            else:
                said = one_line(error.message)
                logger.warning("%s on %s: %s", job.request.request_id, link.address, said)
            job.route.fail(one_line(error.message), link.key)
            self._release(job, attempt)
            self._metrics.attempts_failed.labels(stage=attempt.stage.value).inc()

    def _check_bounds(self, job: _Job, busy: CapacityError | None) -> None:
        self._check_stop()
        if self._clock.monotonic() >= job.deadline:
            raise DeadlineError("the request's deadline passed")
        if job.route.exhausted:
            raise busy or EngineError(f"no worker finished the request: {job.route.reason}")

    def _check_stop(self) -> None:
        if self._stopping:
            raise DrainingError("the router stops; ask again")

    def _choose(self, job: _Job) -> _Choice | None:
        ready = {link.key: link for link in self._members.with_room(job.num_tokens)}
        options = list(self._options(job, ready))
        if not options:
            return None
        picked = self._picker.pick(options, _pick_request(job))
        link = ready[picked.worker.key]
        if picked.partner is not None:
            return _Choice(link, picked.stage, ready[picked.partner.key])
        if not job.route.has_begun and link.role is not Role.AGGREGATED:
            self._declined.note(job.route.obstacles(ready.values()))
        return _Choice(link, picked.stage, None)

    @staticmethod
    def _options(job: _Job, ready: dict[str, WorkerLink]) -> Iterator[Option]:
        """Each worker that may take the next attempt, or each pair of them."""
        for key, stage in job.route.options(ready.values()).items():
            if stage is not Stage.PAIR:
                yield Option(ready[key], stage)
                continue
            for partner in job.route.partners(ready.values(), ready[key]):
                yield Option(ready[key], stage, ready[partner])

    async def _await_worker(self, job: _Job) -> None:
        """Nobody is left: a request that has begun waits for a worker to come back.

        Raises:
            UnavailableError: none did, or the request has not begun.
        """
        if not job.route.has_begun:
            raise UnavailableError("no worker is ready")
        job.route.forgive()
        # who refuses at once shall not be asked again at once
        await self._members.wait_change(_PAUSE_S)
        now = self._clock.monotonic()
        limit = min(job.deadline, now + self._times.recovery_s)
        while not job.route.options(self._members.with_room(job.num_tokens)):
            remaining_s = limit - self._clock.monotonic()
            if remaining_s <= 0:
                raise UnavailableError(f"no worker is left: {job.route.reason}")
            await self._members.wait_change(remaining_s)

    async def _submit(self, job: _Job, choice: _Choice, attempt: Attempt) -> _Refusal | None:
        """Give the attempt to its worker, or to both of a pair at once."""
        link, stage, partner = choice
        links = [link] if partner is None else [link, partner]
        if stage in (Stage.PREFILL, Stage.PAIR):
            job.prefill_incarnation = link.info.incarnation
        messages = Submission(
            request=job.request,
            attempt=attempt,
            links=links,
            prefill_incarnation=job.prefill_incarnation,
            deadline=job.deadline,
        ).messages(self._tickets, self._clock)
        job.links = {each.key: each for each in links}
        num_tokens = len(job.request.prompt_token_ids) + job.route.num_tokens
        job.before_token_1 = link.num_tokens_in_flight + num_tokens
        job.asked_at = self._clock.monotonic()
        reach("router.hand_over" if stage is Stage.DECODE else "router.submit")
        refusals = await self._submit_all(job, links, messages)
        if refusals:
            # what can never run is said at once, whoever says it
            return min(refusals, key=lambda r: not isinstance(r.error, InvalidRequestError))
        self._metrics.attempts.labels(stage=attempt.stage.value).inc()
        return None

    async def _submit_all(
        self, job: _Job, links: list[WorkerLink], messages: list[worker_pb2.SubmitRequest]
    ) -> list[_Refusal]:
        """Those that refused."""
        results = await asyncio.gather(
            *(each.submit(m, job.inbox) for each, m in zip(links, messages, strict=True)),
            return_exceptions=True,
        )
        refusals = []
        for each, result in zip(links, results, strict=True):
            if isinstance(result, DiptychError):
                refusals.append(_Refusal(each, result))
            elif result is not None:
                raise result
        return refusals

    async def _have_followed(self, job: _Job, attempt: Attempt) -> Attempt:
        """Prefill has sampled token 1: decode may begin to load what it stores. Where none does,
        the hand-off is after the commit."""
        ready = {link.key: link for link in self._members.with_room(job.num_tokens)}
        options = [
            Option(ready[key], stage) for key, stage in job.route.followers(ready.values()).items()
        ]
        if not options:
            return attempt
        link = ready[self._picker.pick(options, _pick_request(job)).worker.key]
        part = job.route.follow(link.key, len(job.request.prompt_token_ids), STORE_CONNECTOR)
        messages = Submission(
            request=job.request,
            attempt=part,
            links=[link],
            prefill_incarnation=job.prefill_incarnation,
            deadline=job.deadline,
        ).messages(self._tickets, self._clock)
        job.links[link.key] = link
        reach("router.hand_over")
        refusals = await self._submit_all(job, [link], messages)
        if refusals:
            logger.info("%s on %s: %s", job.request.request_id, link.address, refusals[0].error)
            del job.links[link.key]
            job.route.unfollow()
        else:
            self._metrics.attempts.labels(stage=part.stage.value).inc()
        assert job.route.attempt is not None
        return job.route.attempt

    async def _follow(self, job: _Job, attempt: Attempt) -> AsyncGenerator[Step, None]:
        """Steps of one attempt until it finishes, hands over or is lost."""
        route = job.route
        wait_until = self._clock.monotonic() + self._times.first_token_s
        asked = False
        while True:
            now = self._clock.monotonic()
            event = await job.inbox.get(min(wait_until, job.deadline) - now)
            self._check_stop()
            if event is None:
                self._give_up(job, attempt)
                return
            if event.entry is None:
                if route.on_lost(event.worker_key, event.reason):
                    self._after_loss(job, attempt)
                    return
                continue
            for step in route.steps(event.worker_key, event.entry):
                if step.outcome is Outcome.STALE:
                    self._metrics.stale_entries.inc()
                    continue
                reach(f"router.{step.outcome.name.lower()}")
                # the books are closed first: who takes the last step may never ask for another
                self._close_books(job, attempt, step.outcome, step.worker_key)
                self._note_times(job, attempt, step.released)
                yield step
                if step.outcome in _ENDS:
                    return
            if attempt.stage is Stage.PREFILL and not (asked or route.awaits_token):
                asked = True
                attempt = await self._have_followed(job, attempt)
            if not route.awaits_token:
                wait_until = job.deadline
            if route.awaits_handoff:
                wait_until = self._clock.monotonic() + self._times.handoff_s

    def _note_times(self, job: _Job, attempt: Attempt, released: Released | None) -> None:
        """Token 1, and token 2 where it is another worker's: the hand-off is done."""
        if released is None or not released.token_ids:
            return
        now = self._clock.monotonic()
        is_first = released.first_position == len(attempt.output_token_ids)
        if is_first and attempt.stage is not Stage.DECODE:
            self._paces.token_1(attempt.worker_key, job.before_token_1, now - job.asked_at)
        if released.first_position == 0 and attempt.stage in (Stage.PREFILL, Stage.PAIR):
            job.token_1_at = now
        if released.first_position + len(released.token_ids) < 2 or job.token_1_at is None:
            return
        way = _WAYS.get(attempt.stage, "none")
        self._metrics.handoff_gap.labels(way=way).observe(now - job.token_1_at)
        if attempt.stage in (Stage.DECODE, Stage.FOLLOWED):
            link = job.links.get(attempt.decode_key or attempt.worker_key)
            per_token = 0 if link is None else link.kv_bytes_per_token
            num_bytes = per_token * len(job.request.prompt_token_ids)
            self._paces.stored(num_bytes, now - job.token_1_at)
        job.token_1_at = None

    def _count_handoff(self, attempt: Attempt, result: str) -> None:
        if attempt.stage in _WAYS:
            self._metrics.handoffs.labels(way=_WAYS[attempt.stage], result=result).inc()

    def _close_books(self, job: _Job, attempt: Attempt, outcome: Outcome, worker_key: str) -> None:
        """Let go of workers that have nothing left to do for the attempt."""
        if outcome is Outcome.LOST:
            self._after_loss(job, attempt)
        elif outcome is Outcome.HANDED_OVER:
            self._count_handoff(attempt, "done")
            self._release(job, attempt, ended=worker_key)
        elif outcome is Outcome.TAKEN_OVER:
            self._count_handoff(attempt, "done")
            if attempt.stage is Stage.PAIR:
                self._release(job, attempt, attempt.worker_key, ended=worker_key)
        elif outcome is Outcome.STORED:
            self._release(job, attempt, worker_key, ended=worker_key)
        elif outcome in _ENDS:
            if worker_key == attempt.decode_key and not job.route.kv_arrived(attempt):
                # its first word was its last, and prefill has not said yet that all was read
                self._count_handoff(attempt, "done")
            self._release(job, attempt, ended=worker_key)

    def _give_up(self, job: _Job, attempt: Attempt) -> None:
        """Nothing came for too long.

        Raises:
            DeadlineError: the request's own deadline passed.
        """
        if self._clock.monotonic() >= job.deadline:
            raise DeadlineError("the request's deadline passed")
        # a hand-off that does not come is the fault of the two, token 1 that of prefill
        late = None if job.route.awaits_handoff else attempt.worker_key
        job.route.fail(f"nothing came from {attempt.worker_key} in time", late)
        self._after_loss(job, attempt)

    def _after_loss(self, job: _Job, attempt: Attempt) -> None:
        logger.warning(
            "%s epoch %d (%s) is lost: %s",
            job.request.request_id,
            attempt.epoch,
            attempt.stage.value,
            job.route.reason,
        )
        self._metrics.attempts_failed.labels(stage=attempt.stage.value).inc()
        if not job.route.kv_arrived(attempt):
            self._count_handoff(attempt, "failed")
        self._release(job, attempt)

    def _release(
        self, job: _Job, attempt: Attempt, only: str | None = None, *, ended: str = ""
    ) -> None:
        """Cancel the attempt on its workers, or on one. Where it `ended` by itself it is only
        forgotten."""
        for key in [only] if only is not None else list(job.links):
            link = job.links.pop(key, None)
            if link is None:
                continue
            if key == ended:
                link.forget(job.request.request_id, attempt.epoch)
            else:
                link.cancel(job.request.request_id, attempt.epoch)

    def _cancel(self, job: _Job) -> None:
        """The request is over here; whoever still works for it shall stop."""
        attempt = job.route.attempt
        if attempt is not None:
            self._release(job, attempt)


def _pick_request(job: _Job) -> PickRequest:
    return PickRequest(
        request_id=job.request.request_id,
        num_prompt_tokens=len(job.request.prompt_token_ids),
        num_output_tokens=job.route.num_tokens,
        priority=job.request.priority,
    )


_WAYS = {
    Stage.PAIR: "direct",
    Stage.PREFILL: "store",
    Stage.FOLLOWED: "store",
    Stage.DECODE: "store",
}
_ENDS = (Outcome.FINISHED, Outcome.HANDED_OVER, Outcome.LOST)
