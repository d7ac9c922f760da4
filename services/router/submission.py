"""What the workers of an attempt are told."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.clock import Clock
from diptych.connectors.tickets import TicketIssuer
from diptych.engine.request import EngineCoreRequest
from diptych.proto import worker_pb2
from diptych.services.router.routable import Role
from diptych.services.router.route import Attempt, Stage
from diptych.services.router.worker_link import WorkerLink
from diptych.wire import commit_to_proto, sampling_to_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One attempt on its workers, prefill first. `prefill_incarnation` is of the worker that
    computed the KV, or is about to; `deadline` is the request's, on the clock's monotonic time."""

    request: EngineCoreRequest
    attempt: Attempt
    links: list[WorkerLink]
    prefill_incarnation: str
    deadline: float

    def messages(self, tickets: TicketIssuer, clock: Clock) -> list[worker_pb2.SubmitRequest]:
        """One for each worker, with a ticket of its own: every ticket has a nonce."""
        ttl_ms = max(1, int((self.deadline - clock.monotonic()) * 1000))
        return [self._message(link, self._ticket(tickets, ttl_ms)) for link in self.links]

    def _message(self, link: WorkerLink, ticket: worker_pb2.Ticket) -> worker_pb2.SubmitRequest:
        request, attempt = self.request, self.attempt
        peer = next((each.peer for each in self.links if each is not link), None)
        is_prefill = attempt.stage in (Stage.PREFILL, Stage.PAIR) and link is self.links[0]
        return worker_pb2.SubmitRequest(
            ticket=ticket,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=attempt.output_token_ids,
            sampling=sampling_to_proto(request.sampling_params),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            handoff_out=is_prefill,
            handoff_in=None if attempt.commit is None else commit_to_proto(attempt.commit),
            handoff_peer=peer,
        )

    def _ticket(self, tickets: TicketIssuer, ttl_ms: int) -> worker_pb2.Ticket:
        by_role = {link.role: link.info.incarnation for link in self.links}
        prefill = by_role.get(Role.PREFILL, "")
        if self.attempt.stage is Stage.DECODE:
            prefill = self.prefill_incarnation
        return tickets.issue(
            self.request.request_id,
            epoch=self.attempt.epoch,
            ttl_ms=ttl_ms,
            prefill_incarnation=prefill,
            decode_incarnation=by_role.get(Role.DECODE, by_role.get(Role.AGGREGATED, "")),
        )
