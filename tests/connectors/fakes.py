"""A request and a cache, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.connectors.base import KVLayout
from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.pages import TokenRange
from diptych.connectors.store_move import finish
from diptych.engine.request import KVCommit, KVTransferParams
from diptych.hashing import HashChain, root_hash

NAMESPACE = b"n" * 32


@dataclass
class Request:
    """A `RequestView` over plain lists."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    kv_transfer_params: KVTransferParams | None = None
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        self._chain = HashChain(root_hash(NAMESPACE, self.cache_salt))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def prefix_hash(self, num_tokens: int) -> bytes:
        tokens = [*self.prompt_token_ids, *self.output_token_ids]
        return self._chain.prefix_hash(tokens, num_tokens)


def producer(request_id: str, tokens: Sequence[int], epoch: int = 1) -> Request:
    params = KVTransferParams(epoch=epoch, do_remote_decode=True)
    return Request(request_id, list(tokens), kv_transfer_params=params)


def consumer(request_id: str, tokens: Sequence[int], commit: KVCommit) -> Request:
    """A request that goes on with token 1."""
    return Request(
        request_id, list(tokens), [7], kv_transfer_params=KVTransferParams(commit=commit)
    )


def follower(request_id: str, tokens: Sequence[int]) -> Request:
    """A request that goes on with token 1 while its prompt is being stored."""
    commit = KVCommit(
        epoch=1, kv_namespace="", num_tokens=len(tokens), objects=[], connector="", pending=True
    )
    return consumer(request_id, tokens, commit)


def make_layout(
    block_size: int, num_blocks: int = 40, dtype: str = "float32", head_dim: int = 4
) -> KVLayout:
    return KVLayout(
        num_blocks=num_blocks,
        num_kv_heads=2,
        num_layers=3,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
    )


def make_cache(layout: KVLayout, seed: int | None = None) -> Tensor:
    """Random values of `seed`, or zeros."""
    dtype = getattr(torch, layout.dtype)
    if seed is None:
        return torch.zeros(layout.shape, dtype=dtype)
    return torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_kv(cache: Tensor, block_ids: Sequence[int], position: int) -> Tensor:
    """`[H_kv, L, 2, D]` of one token: the meaning of a block table."""
    block_size = cache.shape[4]
    return cache[block_ids[position // block_size], :, :, :, position % block_size]


def fetched(copier: CacheCopier, block_ids: Sequence[int], tokens: TokenRange) -> memoryview:
    """The bytes of one object."""
    page = copier.gather(block_ids, tokens)
    view = memoryview(bytearray(page.nbytes))
    finish(copier.fetch(page, copier.mark(), view))
    return view


def scattered(
    copier: CacheCopier,
    view: memoryview,
    object_start: int,
    block_ids: Sequence[int],
    wanted: TokenRange,
) -> None:
    """An object's tokens in their slots, complete."""
    finish(copier.scatter(view, object_start, block_ids, wanted))


def same_kv(
    ours: tuple[Tensor, Sequence[int]], theirs: tuple[Tensor, Sequence[int]], start: int, end: int
) -> bool:
    """Whether two caches hold equal KV of positions [start, end)."""
    return all(torch.equal(token_kv(*ours, p), token_kv(*theirs, p)) for p in range(start, end))
