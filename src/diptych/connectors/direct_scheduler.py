"""The scheduler half of the DirectConnector: tells the hand-off thread what the scheduler did.

Requests without a peer are another connector's, where there is one beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    RequestView,
    StepStage,
)
from diptych.connectors.direct_attempt import TakenPrompt
from diptych.connectors.direct_driver import DirectDriver
from diptych.connectors.direct_given import GivenPrompt
from diptych.connectors.direct_local import LocalRequest
from diptych.connectors.held_prompts import HeldPrompts
from diptych.connectors.page_orders import PageMetadata
from diptych.engine.control_port import ControlPort
from diptych.engine.request import HandoffPeer, KVTransferParams


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """Tokens from position 0 on that have KV once the step ends, and their blocks."""

    request_id: str
    num_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class DirectMetadata(KVConnectorMetadata):
    """One step: chunks of prompts that peers read, and the other connector's part."""

    chunks: list[ComputedChunk] = field(default_factory=list)
    other: KVConnectorMetadata | None = None


class DirectScheduler(KVConnectorScheduler):
    """Decides nothing that waits: a request that reads a peer is passed over until its KV is
    announced, one that is read goes its way as any other.

    `other`, where there is one, has the requests that no peer takes part in, and the prefixes of
    those that a peer reads.
    """

    def __init__(
        self,
        driver: DirectDriver,
        namespace: bytes,
        other: KVConnectorScheduler | None = None,
    ) -> None:
        self._driver = driver
        self._other = other
        self._cards = driver.start(namespace.hex())
        self._given: set[str] = set()
        self._lapsed: set[str] = set()
        self._taken: set[str] = set()
        self._received: set[str] = set()
        self._held = HeldPrompts()
        self._has_told = False

    @property
    def is_expecting(self) -> bool:
        other = self._other is not None and self._other.is_expecting
        return other or self._driver.reports.is_expecting

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        reports = self._driver.reports
        if reports.is_expecting or self._other is None:
            reports.await_arrival(until_s, first=first)
        else:
            self._other.await_arrival(until_s, first=first)

    def hold_until_s(self, limit_s: float) -> float:
        ours = self._driver.reports.hold_until_s(limit_s)
        return ours or (0.0 if self._other is None else self._other.hold_until_s(limit_s))

    def take_arrived(self) -> KVConnectorOutput | None:
        ours = self._driver.reports.take_arrived()
        others = None if self._other is None else self._other.take_arrived()
        if ours is None or others is None:
            return ours or others
        ours.finished_recving |= others.finished_recving
        return ours

    def note_step(self, stage: StepStage, request_ids: Collection[str]) -> None:
        self._driver.reports.first_steps.note(stage, request_ids)
        if self._other is not None:
            self._other.note_step(stage, request_ids)

    def flush(self) -> None:
        if self._has_told:
            self._has_told = False
            self._driver.flush()

    @property
    def handoff_cards(self) -> bytes:
        return self._cards

    def attach_control(self, port: ControlPort) -> None:
        self._driver.attach(port)

    def request_added(self, request: RequestView) -> None:
        params = request.kv_transfer_params
        if params is not None and params.peer is not None and params.reads_peer:
            self._offer(request, params, params.peer)
        elif self._other is not None:
            self._other.request_added(self._for_other(request))

    def request_left_to_store(self, request: RequestView) -> None:
        self._taken.discard(request.request_id)
        if self._other is not None:
            self._other.request_left_to_store(self._for_other(request))

    def is_read(self, request_id: str) -> bool:
        return request_id in self._given and request_id not in self._lapsed

    def request_preempted(self, request: RequestView) -> bool:
        if request.request_id in self._given:
            # what was announced is no longer there: its reader looks for another attempt
            self._lapsed.add(request.request_id)
            self._driver.preempted(request.request_id)
        if self._other is None or request.request_id in self._taken:
            return False
        return self._other.request_preempted(self._for_other(request))

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, num_pending_tokens: int = 0
    ) -> tuple[int | None, bool]:
        if request.request_id in self._taken:
            if not self._driver.reports.is_announced(request.request_id):
                return None, False
            return request.num_tokens - num_computed_tokens, True
        if self._other is None:
            return 0, False
        return self._other.get_num_new_matched_tokens(
            self._for_other(request), num_computed_tokens, num_pending_tokens
        )

    def num_computed_beside(self, request: RequestView) -> int:
        if self._other is None or request.request_id in self._taken:
            return 0
        return self._other.num_computed_beside(self._for_other(request))

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[int], num_external_tokens: int
    ) -> None:
        if request.request_id not in self._taken:
            if self._other is not None:
                self._other.update_state_after_alloc(
                    self._for_other(request), block_ids, num_external_tokens
                )
        elif num_external_tokens:
            local = request.num_tokens - num_external_tokens
            self._driver.reserved(request.request_id, local, block_ids)

    def build_connector_meta(
        self, scheduled: dict[str, tuple[RequestView, list[int], int]]
    ) -> DirectMetadata:
        metadata = DirectMetadata()
        others: dict[str, tuple[RequestView, list[int], int]] = {}
        for request_id, (request, block_ids, num_tokens) in scheduled.items():
            if request_id in self._taken:
                continue
            others[request_id] = (self._for_other(request), block_ids, num_tokens)
            params = request.kv_transfer_params
            if params is None or params.peer is None or params.reads_peer:
                continue
            if request_id in self._lapsed:
                continue
            self._begin(request, params, params.peer)
            if num_tokens < request.num_tokens:
                metadata.chunks.append(ComputedChunk(request_id, num_tokens, list(block_ids)))
        if self._other is not None:
            metadata.other = self._other.build_connector_meta(others)
        self._leave(metadata.other)
        return metadata

    def request_finished(self, request: RequestView, block_ids: list[int]) -> bool:
        request_id = request.request_id
        if request_id in self._taken:
            self._taken.discard(request_id)
            self._driver.taken_released(request_id)
            return False
        sends = False
        if self._other is not None:
            sends = self._other.request_finished(self._for_other(request), block_ids)
        self._received.discard(request_id)
        self._driver.reports.first_steps.forget(request_id)
        if request_id not in self._given:
            return sends
        self._given.discard(request_id)
        lapsed = request_id in self._lapsed
        self._lapsed.discard(request_id)
        if lapsed or not request.is_handed_off:
            self._driver.given_released(request_id)
            return False
        tokens = request.all_token_ids
        self._held.hold(request, block_ids)
        self._has_told = True
        self._driver.done(
            request_id, len(tokens) - 1, block_ids, tokens[-1], request.num_cached_tokens
        )
        return True

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_sending:
            self._held.drop(request_id)
        for request_id in output.saved:
            self._driver.reports.left(request_id)
        # from here on they are requests like others, whose prompts need not be stored again
        received = self._taken & output.handed_over.keys()
        self._taken -= received
        self._received |= received
        self._driver.reports.first_steps.begin(received)
        if self._other is not None:
            self._other.update_connector_output(output)

    def abort(self, request_id: str) -> None:
        if request_id in self._taken:
            self._taken.discard(request_id)
            self._driver.taken_released(request_id)
        elif self._held.holds(request_id):
            self._driver.given_released(request_id)
        else:
            if request_id in self._given:  # what it has computed beside its load was announced
                self._given.discard(request_id)
                self._lapsed.discard(request_id)
                self._driver.given_released(request_id)
            if self._other is not None:
                self._other.abort(request_id)

    def shutdown(self) -> None:
        self._driver.close()
        if self._other is not None:
            self._other.shutdown()

    def _leave(self, other: KVConnectorMetadata | None) -> None:
        """Have the rest of prompts stored that no reader has room for."""
        for request_id in self._driver.reports.take_leaving():
            rest = self._held.rest(request_id)
            if rest is not None and isinstance(other, PageMetadata):
                other.saves.append(rest)
            else:
                self._driver.reports.left(request_id)

    def _offer(self, request: RequestView, params: KVTransferParams, peer: HandoffPeer) -> None:
        self._taken.add(request.request_id)
        self._driver.offer(
            TakenPrompt(
                request_id=request.request_id,
                epoch=params.epoch,
                peer=peer.incarnation,
                num_tokens=request.num_tokens,
                ttl_s=params.ttl_s,
                num_given=request.num_tokens - len(request.prompt_token_ids),
            )
        )

    def _begin(self, request: RequestView, params: KVTransferParams, peer: HandoffPeer) -> None:
        if request.request_id in self._given:
            return
        self._given.add(request.request_id)
        self._driver.begin(
            GivenPrompt(
                request_id=request.request_id,
                epoch=params.epoch,
                peer=peer.incarnation,
                kv_namespace=request.prefix_hash(0).hex(),
                num_given=request.num_tokens - len(request.prompt_token_ids),
            )
        )

    def _for_other(self, request: RequestView) -> RequestView:
        """What the connector beside sees of it."""
        params = request.kv_transfer_params
        if params is None or params.peer is None:
            return request
        return LocalRequest(request, request.request_id in self._received)
