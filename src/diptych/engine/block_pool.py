"""The KV blocks of one engine: who uses them, which are free, which can be hit.

A freed block keeps its hash, and so stays hittable, until it is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# One KV-cache group's name of a full block: (group, hash of the block's last unit).
GroupHash = tuple[int, bytes]


class KVCacheBlock:
    """One block; `previous` and `next` link it into the free queue while nobody uses it."""

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: GroupHash | None = None
        self.previous: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count})"


class FreeBlockQueue:
    """Free blocks, the first to be reused in front. Every operation is O(1) per block moved.

    A doubly linked list through the blocks themselves, between two sentinels that are never out:
    taking a block that was hit out of the middle costs as much as taking the first.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free = 0
        self._front = KVCacheBlock(-1)
        self._back = KVCacheBlock(-1)
        self._front.next, self._back.previous = self._back, self._front
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Take the front block. The caller checks `num_free`."""
        block = self._front.next
        assert block is not None
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: reused last."""
        before = self._back.previous
        assert before is not None
        self._link(before, block, self._back)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block in front: reused first."""
        after = self._front.next
        assert after is not None
        self._link(self._front, block, after)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out, wherever it stands."""
        before, after = block.previous, block.next
        assert before is not None
        assert after is not None
        before.next, after.previous = after, before
        block.previous = block.next = None
        self.num_free -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        before.next = after.previous = block
        block.previous, block.next = before, after
        self.num_free += 1


class BlockPool:
    """All blocks, with reference counts and the map from hash to block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.cached_block_hash_to_block: dict[GroupHash, KVCacheBlock] = {}
        self._free = FreeBlockQueue(self.blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return self._free.num_free

    def get_cached_block(self, block_hash: GroupHash) -> KVCacheBlock | None:
        """The block that holds this content, free or in use."""
        return self.cached_block_hash_to_block.get(block_hash)

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks, least recently used first; their content is forgotten.

        The caller has checked `num_free`.
        """
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take one more reference on blocks that were hit."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop one reference on the blocks of one sequence, given in token order.

        The suffix joins the queue before the prefix and so is evicted first. Blocks that no hash
        names hold nothing worth keeping: they go to the front.
        """
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def cache(self, block: KVCacheBlock, block_hash: GroupHash) -> None:
        """Name a block whose content is complete; content that is named already keeps its block."""
        if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:
            block.block_hash = block_hash
            self.cached_block_hash_to_block[block_hash] = block

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            del self.cached_block_hash_to_block[block.block_hash]
            block.block_hash = None
