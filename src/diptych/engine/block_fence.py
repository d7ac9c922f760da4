"""Blocks that have lost their owner while a step in flight may still write them."""

from __future__ import annotations

from diptych.engine.block_pool import BlockPool, KVCacheBlock

# Blocks in token order, one list per KV-cache group.
BlocksByGroup = tuple[list[KVCacheBlock], ...]


class BlockFence:
    """Gives blocks back to the pool once the last step that was planned with them has completed.

    Work on the device is in order, so a later step could have them at once; a transfer that writes
    beside the device's queue could not.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._completed = 0
        self._held: list[tuple[int, BlocksByGroup]] = []

    @property
    def held(self) -> list[BlocksByGroup]:
        """Blocks that wait for a step."""
        return [blocks for _, blocks in self._held]

    def free(self, blocks: BlocksByGroup, last_step: int) -> None:
        """Give blocks back after `last_step`, the number of the last step that may write them."""
        if last_step > self._completed:
            self._held.append((last_step, blocks))
        else:
            self._release(blocks)

    def complete(self, step: int) -> None:
        """All steps up to this number have completed on the device."""
        self._completed = step
        waiting, self._held = self._held, []
        for last_step, blocks in waiting:
            self.free(blocks, last_step)

    def _release(self, blocks: BlocksByGroup) -> None:
        for group in blocks:
            self._pool.free(group)
