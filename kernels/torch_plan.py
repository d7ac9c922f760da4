"""What attention on a CPU reads for one step: worked out once, used by every layer.

Sequences with one query are batched: their blocks are gathered into one padded tensor, its dead
slots cleared and masked. Sequences with more run one by one, in tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries of a tile: small enough to skip most of what causality hides, large enough for the matmul.
QUERY_TILE = 64
# Padding a sequence by this many tokens costs about as much as one more batch.
PADDING_SLACK = 128


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of the tensors a plan depends on."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    sliding_window: int


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """`n` sequences with one query each, gathered to a common length `c`.

    Attributes:
        q_rows: `[n]`, their rows of q; None where they are all of q, in order.
        blocks: `[n * H_kv * c / block_size]`, which `(block, head)` of the cache to gather.
        span: the slots `(first, end)` that are alive, where that is the same for all.
        dead: otherwise the rows of `[n * H_kv * c]` that are not; they hold anything, even NaN.
        bias: `[n * H_kv, G, c]`, -inf over dead slots.
    """

    count: int
    q_rows: Tensor | None
    blocks: Tensor
    span: tuple[int, int] | None
    dead: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries `start..end` of q against slots `first..last` of what was gathered.

    `bias` `[end - start, w]` is added to the scores of the last w slots.
    """

    start: int
    end: int
    first: int
    last: int
    bias: Tensor


@dataclass(frozen=True, slots=True)
class ManyQueries:
    """One sequence with more queries; `blocks` as in `SingleQueries`, for n = 1."""

    blocks: Tensor
    tiles: list[QueryTile]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step. Rows of q that belong to no sequence are in neither list; their output is zero."""

    singles: list[SingleQueries]
    many: list[ManyQueries]


def plan_attention(
    shape: AttentionShape, block_tables: Tensor, query_starts: list[int] | None, seq_lens: Tensor
) -> AttentionPlan:
    """Plan a step; `query_starts` as `query_start_loc`, None for one query per sequence."""
    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if query_starts is None else query_starts
    counts = [
        min(end - start, length)
        for start, end, length in zip(starts, starts[1:], lengths, strict=False)
    ]
    singles = [i for i, count in enumerate(counts) if count == 1]
    groups = [
        _plan_singles(
            shape,
            block_tables[members],
            [lengths[i] for i in members],
            None if members == list(range(starts[-1])) else [starts[i] for i in members],
        )
        for members in _split_by_length(singles, lengths)
    ]
    many = [
        _plan_many(shape, block_tables[i], starts[i], counts[i], lengths[i])
        for i, count in enumerate(counts)
        if count > 1
    ]
    return AttentionPlan(groups, many)


def _split_by_length(members: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Groups whose padding is worth less than another batch; each in ascending order."""
    rest = sorted(members, key=lambda i: -lengths[i])
    while rest:
        longest = lengths[rest[0]]
        group = [i for i in rest if 2 * (lengths[i] + PADDING_SLACK) >= longest]
        yield sorted(group)
        rest = rest[len(group) :]


def _first_visible(position: int, window: int) -> int:
    return max(position - window + 1, 0) if window else 0


def _plan_singles(
    shape: AttentionShape, block_tables: Tensor, lengths: list[int], q_rows: list[int] | None
) -> SingleQueries:
    size, heads, n = shape.block_size, shape.num_kv_heads, len(lengths)
    first = [_first_visible(length - 1, shape.sliding_window) for length in lengths]
    first_block = torch.tensor([f // size for f in first])[:, None]
    end_block = torch.tensor([-(-length // size) for length in lengths])[:, None]
    num_blocks = int((end_block - first_block).max())
    # [n, num_blocks]; past a sequence's end its last block stands in, dead
    index = (first_block + torch.arange(num_blocks)).clamp_(max=end_block - 1)
    blocks = block_tables.gather(1, index.to(block_tables.device)).long()
    rows = blocks[:, None] * heads + torch.arange(heads, device=blocks.device)[None, :, None]
    offsets = [f - int(b) * size for f, b in zip(first, first_block, strict=True)]
    spans = {(o, o + le - f) for o, le, f in zip(offsets, lengths, first, strict=True)}
    rows_of_q = None if q_rows is None else torch.tensor(q_rows, device=blocks.device)
    if len(spans) == 1:
        return SingleQueries(n, rows_of_q, rows.flatten(), spans.pop(), None, None)
    slots = torch.arange(num_blocks * size)
    start = torch.tensor(offsets)[:, None]
    end = start + (torch.tensor(lengths) - torch.tensor(first))[:, None]
    # [n, c]
    dead = ((slots < start) | (slots >= end)).to(blocks.device)
    group = shape.num_heads // heads
    bias = torch.zeros(dead.shape, device=blocks.device).masked_fill_(dead, -torch.inf)
    bias = bias[:, None, None].expand(n, heads, group, -1).reshape(n * heads, group, -1)
    dead_rows = dead[:, None].expand(n, heads, -1).flatten().nonzero()[:, 0]
    return SingleQueries(n, rows_of_q, rows.flatten(), None, dead_rows, bias)


def _plan_many(
    shape: AttentionShape, block_table: Tensor, start: int, count: int, length: int
) -> ManyQueries:
    size, heads, window = shape.block_size, shape.num_kv_heads, shape.sliding_window
    first_block = _first_visible(length - count, window) // size
    blocks = block_table[first_block : -(-length // size)].long()
    rows = (torch.arange(heads, device=blocks.device)[:, None] + blocks * heads).flatten()
    base = first_block * size
    tiles = []
    for tile in range(0, count, QUERY_TILE):
        queries = min(QUERY_TILE, count - tile)
        position = length - count + tile
        first, last = _first_visible(position, window), position + queries
        bias = _tile_bias(position, queries, first if window else position, last, window)
        tiles.append(
            QueryTile(
                start + tile,
                start + tile + queries,
                first - base,
                last - base,
                bias.to(blocks.device),
            )
        )
    return ManyQueries(rows, tiles)


def _tile_bias(position: int, queries: int, first: int, last: int, window: int) -> Tensor:
    """`[queries, last - first]`: -inf where query `position + i` does not see key `first + j`."""
    at = torch.arange(position, position + queries)[:, None]
    keys = torch.arange(first, last)
    hidden = keys > at
    if window:
        hidden |= keys <= at - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
