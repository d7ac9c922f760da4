"""The plan's meaning: KV moved one (token, head, layer, part) at a time between rank pools."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.plan import BlockTable, plan_read, plan_sources
from diptych.connectors.plan_geometry import PoolGeometry, Span, rank_heads, rank_layers
from diptych.connectors.transports.base import Runs

Pool = NDArray[np.uint8]


class Ranks:
    """The pools of one worker: pp x tp ranks, with block tables of one request."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        tp: int,
        pp: int,
        num_kv_heads: int,
        num_layers: int,
        block_size: int,
        num_tokens: int,
        axes: tuple[str, ...],
        parts: int = 2,
        atom_bytes: int = 3,
        spare_blocks: int = 2,
    ) -> None:
        blocks = -(-num_tokens // block_size)
        self.geometries = [
            PoolGeometry(
                num_blocks=blocks + spare_blocks,
                block_size=block_size,
                heads=rank_heads(num_kv_heads, tp, rank),
                layers=rank_layers(num_layers, pp, stage),
                atom_bytes=atom_bytes,
                parts=parts,
                axes=axes,
                offset_bytes=5,
            )
            for stage in range(pp)
            for rank in range(tp)
        ]
        # a worker's ranks share one block table
        self.ids = rng.permutation(blocks + spare_blocks)[:blocks]
        self.pools = [rng.integers(0, 256, 5 + g.num_bytes, np.uint8) for g in self.geometries]

    def fill(self, kv: NDArray[np.uint8]) -> None:
        """Write a prompt's `[token, head, layer, part, atom]` into every rank that holds it."""
        for geometry, pool in zip(self.geometries, self.pools, strict=True):
            for where, at in places(geometry, self.ids, range(len(kv))):
                pool[at : at + geometry.atom_bytes] = kv[where]


def places(geometry: PoolGeometry, ids: NDArray[np.int64], tokens: range) -> list[tuple]:
    """((token, head, layer, part), byte offset) of everything that a rank holds of `tokens`."""
    sizes = {
        "head": len(geometry.heads),
        "layer": len(geometry.layers),
        "part": geometry.parts,
        "slot": geometry.block_size,
    }
    found = []
    for token in tokens:
        block, slot = divmod(token, geometry.block_size)
        for head in range(geometry.heads.start, geometry.heads.end):
            for layer in range(geometry.layers.start, geometry.layers.end):
                for part in range(geometry.parts):
                    index = {
                        "head": head - geometry.heads.start,
                        "layer": layer - geometry.layers.start,
                        "part": part,
                        "slot": slot,
                    }
                    at = int(ids[block])
                    for axis in geometry.axes:
                        at = at * sizes[axis] + index[axis]
                    start = geometry.offset_bytes + at * geometry.atom_bytes
                    found.append(((token, head, layer, part), start))
    return found


def move(source: Ranks, target: Ranks, start: int, end: int, *, whole_tail: bool = False) -> int:
    """Carry out the plan of every target rank; returns the number of runs."""
    count = 0
    for rank, geometry in enumerate(target.geometries):
        for share in plan_sources(source.geometries, geometry, rank):
            runs = plan_read(
                source.geometries[share.source],
                geometry,
                share,
                BlockTable(source.ids),
                BlockTable(target.ids),
                start,
                end,
                whole_tail=whole_tail,
            )
            copy(runs, source.pools[share.source], target.pools[rank])
            count += len(runs)
    return count


def copy(runs: Runs, source: Pool, target: Pool) -> None:
    runs.check(len(source), len(target))
    for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
        target[dst : dst + length] = source[src : src + length]


def expected(target: Ranks, kv: NDArray[np.uint8], start: int, end: int) -> list[Pool]:
    """The target's pools after an element-by-element move of tokens [start, end)."""
    pools = [pool.copy() for pool in target.pools]
    for geometry, pool in zip(target.geometries, pools, strict=True):
        for where, at in places(geometry, target.ids, range(start, end)):
            pool[at : at + geometry.atom_bytes] = kv[where]
    return pools


def prompt(rng: np.random.Generator, tokens: int, heads: int, layers: int, parts: int) -> Pool:
    """Random KV, `[token, head, layer, part, atom]`."""
    return rng.integers(0, 256, (tokens, heads, layers, parts, 3), np.uint8)


def span(start: int, end: int) -> Span:
    return Span(start, end)
