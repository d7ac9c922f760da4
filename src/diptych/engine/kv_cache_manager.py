"""Which blocks hold which request's tokens, and what of a new prompt is in the cache already."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from diptych.engine.block_fence import BlockFence, BlocksByGroup
from diptych.engine.block_pool import BlockPool
from diptych.engine.scheduler_request import SchedulerRequest

BlockIds = tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix that the cache holds; nothing is taken until `allocate_slots`."""

    blocks: BlocksByGroup
    num_tokens: int


class KVCacheManager:
    """Hands out blocks by whole requests' needs: all that is asked for, or nothing changes."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        num_groups: int = 1,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.pool = BlockPool(num_blocks)
        self.fence = BlockFence(self.pool)
        self.req_to_blocks: dict[str, BlocksByGroup] = {}
        self._num_cached_blocks: dict[str, int] = {}
        self._quarantine: dict[str, tuple[BlocksByGroup, int]] = {}
        self._enable_caching = enable_caching
        self._no_ids: BlockIds = tuple([] for _ in range(num_groups))

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the whole pool can hold."""
        return self.pool.num_blocks // self.num_groups * self.block_size

    @property
    def quarantined(self) -> Collection[str]:
        """Ended requests whose blocks a transfer may still touch."""
        return self._quarantine.keys()

    def get_computed_blocks(self, request: SchedulerRequest) -> ComputedBlocks:
        """The longest cached prefix in whole blocks, at least the last token left to compute."""
        if not self._enable_caching or request.skip_reading_prefix_cache:
            return ComputedBlocks(tuple([] for _ in range(self.num_groups)), 0)
        hashes = request.block_hashes(self.block_size)
        found: BlocksByGroup = tuple([] for _ in range(self.num_groups))
        for block_hash in hashes[: (request.num_tokens - 1) // self.block_size]:
            hit = [self.pool.get_cached_block((g, block_hash)) for g in range(self.num_groups)]
            blocks = [block for block in hit if block is not None]
            if len(blocks) < self.num_groups:
                break
            for group, block in zip(found, blocks, strict=True):
                group.append(block)
        return ComputedBlocks(found, len(found[0]) * self.block_size)

    def can_fit(self, computed: ComputedBlocks, num_tokens: int, spare: int = 0) -> bool:
        """Whether a new request of `num_tokens` tokens that starts from `computed` fits now, and
        leaves `spare` blocks."""
        needed = sum(self._blocks_for(num_tokens) - len(group) for group in computed.blocks)
        revived = sum(block.ref_count == 0 for group in computed.blocks for block in group)
        return needed + revived + spare <= self.pool.num_free

    def allocate_slots(
        self, request: SchedulerRequest, num_tokens: int, computed: ComputedBlocks | None = None
    ) -> BlockIds | None:
        """Give the request blocks for its first `num_tokens` tokens, all of them or none.

        Args:
            computed: the hit that a request without blocks starts from.

        Returns:
            Ids of the blocks added per group, hits included; None if there are too few.
        """
        request_id = request.request_id
        if computed is not None:
            if not self.can_fit(computed, num_tokens):
                return None
            self._start(request_id, computed)
        held = self.req_to_blocks[request_id]
        if computed is None and num_tokens <= len(held[0]) * self.block_size:
            return self._no_ids  # most steps of most requests
        missing = [max(0, self._blocks_for(num_tokens) - len(group)) for group in held]
        if sum(missing) > self.pool.num_free:
            return None
        added = tuple(self.pool.allocate(count) for count in missing)
        for group, new in zip(held, added, strict=True):
            group.extend(new)
        return self.get_block_ids(request_id) if computed is not None else _ids(added)

    def cache_blocks(self, request: SchedulerRequest, num_tokens: int) -> None:
        """Name the blocks that the request's first `num_tokens` tokens fill, for others to find.

        Their KV is there, or will be before anything reads it: a step writes the KV of all its
        tokens, layer by layer, ahead of attention.
        """
        if not self._enable_caching:
            return
        first = self._num_cached_blocks[request.request_id]
        full = num_tokens // self.block_size
        if full <= first:
            return
        hashes = request.block_hashes(self.block_size)
        for group, blocks in enumerate(self.req_to_blocks[request.request_id]):
            for index in range(first, full):
                self.pool.cache(blocks[index], (group, hashes[index]))
        self._num_cached_blocks[request.request_id] = full

    def get_block_ids(self, request_id: str) -> BlockIds:
        return _ids(self.req_to_blocks[request_id])

    def free(self, request_id: str, last_step: int = 0) -> None:
        """Give a request's blocks back; nothing happens for one without blocks.

        Args:
            last_step: number of the last step that may write them; they are free after it.
        """
        self._num_cached_blocks.pop(request_id, None)
        self.fence.free(self.req_to_blocks.pop(request_id, ()), last_step)

    def quarantine(self, request_id: str, last_step: int = 0) -> None:
        """Keep an ended request's blocks from reuse: a transfer may still touch them."""
        self._num_cached_blocks.pop(request_id, None)
        self._quarantine[request_id] = self.req_to_blocks.pop(request_id, ()), last_step

    def release_quarantine(self, request_id: str) -> None:
        """The transfer has ended: the blocks are free, after the last step that may write them."""
        self.fence.free(*self._quarantine.pop(request_id))

    def _start(self, request_id: str, computed: ComputedBlocks) -> None:
        for group in computed.blocks:
            self.pool.touch(group)
        self.req_to_blocks[request_id] = tuple(list(group) for group in computed.blocks)
        self._num_cached_blocks[request_id] = len(computed.blocks[0])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _ids(blocks: BlocksByGroup) -> BlockIds:
    return tuple([block.block_id for block in group] for group in blocks)
