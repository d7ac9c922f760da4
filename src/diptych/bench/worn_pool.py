"""How many runs of bytes a prompt's blocks are, once pools have been used for long."""

from __future__ import annotations

import random
from itertools import count, pairwise

from diptych.engine.block_pool import BlockPool, KVCacheBlock

_POOL_TOKENS = 1 << 19
_NUM_REQUESTS = 1000
_MIN_TOKENS, _MAX_TOKENS = 64, 16384


def runs_of_prompt(num_tokens: int, block_size: int) -> int:
    """Runs that a copy of a prompt's blocks from one worn pool into another is, where neighbours in
    both are copied as one; at most its number of blocks."""
    needed = -(-num_tokens // block_size)
    sources, targets = (_worn_blocks(needed, block_size, seed) for seed in (1, 2))
    pairs = sorted(zip(sources, targets, strict=True))
    joined = sum(b == (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
    return needed - joined


def _worn_blocks(needed: int, block_size: int, seed: int) -> list[int]:
    """Blocks given to a prompt after many requests have come, grown block by block, and gone."""
    rng, names = random.Random(seed), count()
    pool = BlockPool(_POOL_TOKENS // block_size + needed)
    live: list[list[KVCacheBlock]] = []
    for _ in range(_NUM_REQUESTS):
        wanted = -(-rng.randint(_MIN_TOKENS, _MAX_TOKENS) // block_size)
        while pool.num_free < wanted + needed + len(live):
            pool.free(live.pop(rng.randrange(len(live))))
        live.append(pool.allocate(wanted))
        for blocks in live:
            blocks += pool.allocate(1)  # each has decoded for a while
        for block in live[-1]:
            pool.cache(block, (0, next(names).to_bytes(8, "little")))
    return [block.block_id for block in pool.allocate(needed)]
