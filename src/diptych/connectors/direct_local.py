"""A request that a peer reads, as the connector beside sees it: one that goes nowhere.

So its prefix is looked for in the store, and its pages go there in the background.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.connectors.base import RequestView
from diptych.engine.request import KVTransferParams


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A `RequestView` without a hand-off."""

    request: RequestView

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def all_token_ids(self) -> list[int]:
        return self.request.all_token_ids

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.request.num_computed_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self.request.num_cached_tokens

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def is_handed_off(self) -> bool:
        return False

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        return None

    def prefix_hash(self, num_tokens: int) -> bytes:
        return self.request.prefix_hash(num_tokens)
