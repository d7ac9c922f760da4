"""Prompts that are held for a reader, and what a store has not got of them: their tails.

Pages go to the store as they fill. The tail follows only where a prompt is left to the store,
since nobody but its own reader looks for it.
"""

from __future__ import annotations

from diptych.connectors.base import RequestView
from diptych.connectors.page_orders import SaveOrder
from diptych.connectors.pages import PageObject, object_ranges
from diptych.hashing import PAGE_TOKENS


class HeldPrompts:
    """By request; the last token of each is sampled, and has no KV."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[RequestView, list[int]]] = {}

    def hold(self, request: RequestView, block_ids: list[int]) -> None:
        """It is computed; its blocks stay until it is dropped here."""
        self._held[request.request_id] = (request, list(block_ids))

    def drop(self, request_id: str) -> None:
        """Its blocks may go."""
        self._held.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def rest(self, request_id: str) -> SaveOrder | None:
        """What stores its tail, if it has one, and is told of; None for one that is not held."""
        held = self._held.get(request_id)
        if held is None:
            return None
        request, block_ids = held
        ranges = object_ranges(request.num_tokens - 1)
        tails = [r for r in ranges if r.end - r.start < PAGE_TOKENS]
        return SaveOrder(
            request_id=request_id,
            epoch=0,
            kv_namespace="",
            num_cached_tokens=0,
            objects=[PageObject(request.prefix_hash(tail.end), *tail) for tail in tails],
            block_ids=block_ids,
            last=True,
            hand_off=False,
            tenant=request.tenant,
            told=True,
        )
