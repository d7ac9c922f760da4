"""Canonical KV objects: which a prompt has, what they are called, where their tokens lie.

An object is a page of 64 tokens or the *tail* after the last full page, in one layout whatever the
block size: `[num_kv_heads, num_layers, 2, tokens, head_dim]`. A page's key is the hash of its last
unit; a tail's key continues the chain over its tokens. This file plans by token positions and knows
no tensors; `page_copy` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diptych.connectors.base import ITEM_BYTES, KVLayout
from diptych.engine.request import KVObject
from diptych.errors import ConfigError
from diptych.hashing import PAGE_TOKENS


class TokenRange(NamedTuple):
    """Token positions [start, end)."""

    start: int
    end: int


class BlockRun(NamedTuple):
    """`num_tokens` slots from `slot` on in the request's block number `block_index`.

    In the object they stand from token `offset` on.
    """

    block_index: int
    slot: int
    num_tokens: int
    offset: int


@dataclass(frozen=True, slots=True)
class PageObject:
    """One object to be stored."""

    key: bytes
    start_token: int
    end_token: int


def object_ranges(num_tokens: int) -> list[TokenRange]:
    """The objects of a prompt: its full pages, then one tail if tokens are left."""
    return [
        TokenRange(start, min(start + PAGE_TOKENS, num_tokens))
        for start in range(0, num_tokens, PAGE_TOKENS)
    ]


def plan_objects(num_tokens: int, prefix_hash: Callable[[int], bytes]) -> list[PageObject]:
    """The objects of a prompt with their keys."""
    return [PageObject(prefix_hash(r.end), *r) for r in object_ranges(num_tokens)]


def block_runs(wanted: TokenRange, object_start: int, block_size: int) -> list[BlockRun]:
    """Where the tokens `wanted` of an object that starts at `object_start` lie in blocks."""
    runs = []
    position = wanted.start
    while position < wanted.end:
        block_index, slot = divmod(position, block_size)
        count = min(block_size - slot, wanted.end - position)
        runs.append(BlockRun(block_index, slot, count, position - object_start))
        position += count
    return runs


def overlapping(objects: list[KVObject], wanted: TokenRange) -> list[KVObject]:
    """The objects that hold a token of `wanted`, in order."""
    if wanted.start >= wanted.end:
        return []
    return [o for o in objects if o.start_token < wanted.end and o.end_token > wanted.start]


def token_bytes(layout: KVLayout) -> int:
    """Bytes of one token's KV over all heads and layers.

    Raises:
        ConfigError: the dtype cannot be stored.
    """
    item = ITEM_BYTES.get(layout.dtype)
    if item is None:
        raise ConfigError(f"KV of dtype {layout.dtype!r} cannot be moved")
    return layout.num_kv_heads * layout.num_layers * 2 * layout.head_dim * item
