"""How one rank's KV pool lies in memory, and which rank holds what."""

from __future__ import annotations

import msgspec

from diptych.errors import TransferError

# our own layout: `[block, kv_head, layer, 2, slot, head_dim]` (docs/decisions/0001)
HEAD_OUTERMOST = ("head", "layer", "part", "slot")
# other orders that a pool may have; `[block, layer, slot, latent]` of MLA is LAYER_OUTERMOST too
LAYER_OUTERMOST = ("layer", "part", "head", "slot")
SLOT_BEFORE_HEAD = ("layer", "part", "slot", "head")
AXES = frozenset(HEAD_OUTERMOST)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Indices [start, end)."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def overlap(self, other: Span) -> Span:
        """What both have; empty where nothing."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.end, other.end)))

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


class PoolGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's pool of one KV-cache group, inside one registered region. Travels in handshakes.

    A block is contiguous; `axes` gives the order in it, outermost first. The innermost run, an
    *atom*, is one token's key (or value) of one head in one layer: `head_dim * itemsize` bytes.
    With MLA it is the latent: one "head", one part.

    Attributes:
        heads: global KV heads it holds. With more ranks than heads, several ranks hold one head.
        layers: global layers it holds.
        parts: 2 (key, value), or 1.
        offset_bytes: where block 0 begins in the region.
        dtype: of the elements; compared, never used.
    """

    num_blocks: int
    block_size: int
    heads: Span
    layers: Span
    atom_bytes: int
    parts: int = 2
    axes: tuple[str, ...] = HEAD_OUTERMOST
    offset_bytes: int = 0
    dtype: str = ""

    def __post_init__(self) -> None:
        if len(self.axes) != len(AXES) or set(self.axes) != AXES:
            raise TransferError(f"the axes of a block are {sorted(AXES)}, not {self.axes}")
        sizes = (self.num_blocks, self.block_size, self.atom_bytes, self.parts)
        if min(*sizes, len(self.heads), len(self.layers)) < 1 or self.offset_bytes < 0:
            raise TransferError("a pool's geometry has an empty axis")

    @property
    def block_bytes(self) -> int:
        tokens = self.block_size * self.parts * self.atom_bytes
        return tokens * len(self.heads) * len(self.layers)

    @property
    def num_bytes(self) -> int:
        """Of the pool, `offset_bytes` not counted."""
        return self.num_blocks * self.block_bytes

    def strides(self) -> dict[str, int]:
        """Bytes from one index of an axis to the next."""
        extents = {
            "head": len(self.heads),
            "layer": len(self.layers),
            "part": self.parts,
            "slot": self.block_size,
        }
        strides: dict[str, int] = {}
        size = self.atom_bytes
        for axis in reversed(self.axes):
            strides[axis] = size
            size *= extents[axis]
        return strides


def rank_heads(num_kv_heads: int, tp_size: int, tp_rank: int) -> Span:
    """The KV heads of one tensor-parallel rank: an equal share, or one head that others hold too.

    Raises:
        TransferError: neither divides the other.
    """
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return Span(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads:
        raise TransferError(f"{num_kv_heads} KV heads cannot be spread over {tp_size} ranks")
    head = tp_rank // (tp_size // num_kv_heads)
    return Span(head, head + 1)


def rank_layers(num_layers: int, pp_size: int, pp_rank: int) -> Span:
    """The layers of one pipeline rank: equal shares, the first ranks one more where it must be."""
    share, more = divmod(num_layers, pp_size)
    start = pp_rank * share + min(pp_rank, more)
    return Span(start, start + share + (pp_rank < more))
