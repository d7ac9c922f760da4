"""A request of a direct hand-off as the connector beside sees it: one that goes nowhere.

Where a peer reads it, its prefix is looked for in the store, and its pages go there in the
background. Where it was read from a peer, its prompt is that peer's to store, its output its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.connectors.base import RequestView
from diptych.engine.request import KVCommit, KVTransferParams

_RECEIVED = KVTransferParams(
    commit=KVCommit(epoch=1, kv_namespace="", num_tokens=0, objects=[], connector="")
)


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A `RequestView` without a hand-off; a `received` one has a commit, of nothing."""

    request: RequestView
    received: bool = False

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
        return _RECEIVED if self.received else None

    def prefix_hash(self, num_tokens: int) -> bytes:
        return self.request.prefix_hash(num_tokens)
