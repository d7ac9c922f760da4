"""A request's life across workers: choose, submit, follow, hand over, and start again when lost.

The state of a request is a `RequestRoute` (pure); this file gives it workers, time and an inbox.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from diptych.clock import Clock
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
from diptych.services.router.inbox import Inbox
from diptych.services.router.membership import Members
from diptych.services.router.metrics import RouterMetrics
from diptych.services.router.picker import Option, Picker, PickRequest
from diptych.services.router.route import (
    Attempt,
    Outcome,
    Released,
    RequestRoute,
    Role,
    Stage,
    Step,
)
from diptych.services.router.worker_link import WorkerLink
from diptych.wire import commit_to_proto, sampling_to_proto

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
    link: WorkerLink | None = None
    prefill_incarnation: str = ""


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
    ) -> None:
        self._members = members
        self._picker = picker
        self._tickets = tickets
        self._clock = clock
        self._metrics = metrics
        self._times = times or DispatchTimes()
        self._jobs: set[_Job] = set()
        self._stopping = False

    def stop(self) -> None:
        """End every request, now and from now on, with a `DrainingError`."""
        self._stopping = True
        for job in self._jobs:
            job.inbox.on_lost("", "the router stops")

    @asynccontextmanager
    async def run(
        self, request: EngineCoreRequest, deadline: float
    ) -> AsyncIterator[AsyncIterator[Released]]:
        """The request's tokens, in order, each once. Leaving the block early cancels it everywhere.

        Args:
            deadline: on the clock's monotonic time.

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
            route=RequestRoute(max_tokens),
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
            option = self._choose(job)
            if option is None:
                if busy is not None:
                    raise busy
                await self._await_worker(job)
                continue
            link = self._link(option.worker.key)
            attempt = job.route.begin(link, option.stage)
            try:
                await self._submit(job, link, attempt)
            except CapacityError as error:
                busy = error
                job.route.fail(error.message)
            except InvalidRequestError:
                raise
            except DiptychError as error:
                logger.warning("%s on %s: %s", job.request.request_id, link.address, error)
                job.route.fail(error.message)
            else:
                return attempt
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

    def _choose(self, job: _Job) -> Option | None:
        ready = {link.key: link for link in self._members.ready}
        stages = job.route.options(ready.values())
        if not stages:
            return None
        options = [Option(ready[key], stage) for key, stage in stages.items()]
        request = PickRequest(
            request_id=job.request.request_id,
            num_prompt_tokens=len(job.request.prompt_token_ids),
            num_output_tokens=job.route.num_tokens,
            priority=job.request.priority,
        )
        return self._picker.pick(options, request)

    def _link(self, key: str) -> WorkerLink:
        return next(link for link in self._members.ready if link.key == key)

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
        while not job.route.options(self._members.ready):
            remaining_s = limit - self._clock.monotonic()
            if remaining_s <= 0:
                raise UnavailableError(f"no worker is left: {job.route.reason}")
            await self._members.wait_change(remaining_s)

    async def _submit(self, job: _Job, link: WorkerLink, attempt: Attempt) -> None:
        request = job.request
        if attempt.stage is Stage.PREFILL:
            job.prefill_incarnation = link.info.incarnation
        message = worker_pb2.SubmitRequest(
            ticket=self._ticket(job, link, attempt),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=attempt.output_token_ids,
            sampling=sampling_to_proto(request.sampling_params),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            handoff_out=attempt.stage is Stage.PREFILL,
            handoff_in=None if attempt.commit is None else commit_to_proto(attempt.commit),
        )
        job.link = link
        reach("router.submit")
        await link.submit(message, job.inbox)
        self._metrics.attempts.labels(stage=attempt.stage.value).inc()

    def _ticket(self, job: _Job, link: WorkerLink, attempt: Attempt) -> worker_pb2.Ticket:
        own = link.info.incarnation
        prefill = job.prefill_incarnation if attempt.stage is Stage.DECODE else ""
        return self._tickets.issue(
            job.request.request_id,
            epoch=attempt.epoch,
            ttl_ms=max(1, int((job.deadline - self._clock.monotonic()) * 1000)),
            prefill_incarnation=own if link.role is Role.PREFILL else prefill,
            decode_incarnation="" if link.role is Role.PREFILL else own,
        )

    async def _follow(self, job: _Job, attempt: Attempt) -> AsyncGenerator[Step, None]:
        """Steps of one attempt until it finishes, hands over or is lost."""
        route = job.route
        wait_until = self._clock.monotonic() + self._times.first_token_s
        while True:
            now = self._clock.monotonic()
            event = await job.inbox.get(min(wait_until, job.deadline) - now)
            self._check_stop()
            if event is None:
                if self._clock.monotonic() >= job.deadline:
                    raise DeadlineError("the request's deadline passed")
                self._lose(job, attempt, f"nothing came from {attempt.worker_key} in time")
                return
            if event.entry is None:
                if event.worker_key == attempt.worker_key:
                    self._lose(job, attempt, event.reason)
                    return
                continue
            step = route.on_entry(event.worker_key, event.entry)
            if step.outcome is Outcome.STALE:
                self._metrics.stale_entries.inc()
                continue
            reach(f"router.{step.outcome.name.lower()}")
            # the books are closed first: who takes the last step may never ask for another
            if step.outcome is Outcome.LOST:
                self._after_loss(job, attempt, route.reason)
            elif step.outcome is not Outcome.CONTINUE:
                self._forget(job, attempt)
            yield step
            if step.outcome is not Outcome.CONTINUE:
                return
            wait_until = job.deadline
            if attempt.stage is Stage.PREFILL and route.num_tokens:
                wait_until = self._clock.monotonic() + self._times.handoff_s

    def _lose(self, job: _Job, attempt: Attempt, reason: str) -> None:
        job.route.fail(reason)
        self._after_loss(job, attempt, reason)

    def _after_loss(self, job: _Job, attempt: Attempt, reason: str) -> None:
        logger.warning(
            "%s epoch %d (%s) is lost: %s",
            job.request.request_id,
            attempt.epoch,
            attempt.stage.value,
            reason,
        )
        self._metrics.attempts_failed.labels(stage=attempt.stage.value).inc()
        if job.link is not None:
            job.link.cancel(job.request.request_id, attempt.epoch)
            job.link = None

    def _forget(self, job: _Job, attempt: Attempt) -> None:
        """The attempt ended by itself at its worker."""
        if job.link is not None:
            job.link.forget(job.request.request_id, attempt.epoch)
            job.link = None

    def _cancel(self, job: _Job) -> None:
        """The request is over here; whoever still works for it shall stop."""
        attempt = job.route.attempt
        if job.link is not None and attempt is not None:
            job.link.cancel(job.request.request_id, attempt.epoch)
