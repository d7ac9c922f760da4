import sys
from collections.abc import Callable, Iterator

import pytest

from diptych.engine.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock


def name(content: int) -> tuple[int, bytes]:
    return (0, content.to_bytes(4, "little"))


class CountedBlock(KVCacheBlock):
    """Counts how often any block of it is looked at."""

    looks = 0

    def __getattribute__(self, attribute: str) -> object:
        CountedBlock.looks += 1
        return super().__getattribute__(attribute)

    def __eq__(self, other: object) -> bool:
        CountedBlock.looks += 1
        return self is other

    __hash__ = KVCacheBlock.__hash__


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that the action executes: its work, not its time."""
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Callable[..., object]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def walk(pool: BlockPool) -> Iterator[int]:
    """Ids in the free queue, front to back."""
    block = pool._free._front.next
    while block is not None and block.next is not None:
        yield block.block_id
        block = block.next


@pytest.mark.parametrize("operation", ["popleft", "append", "prepend", "remove"])
def test_the_free_queue_looks_at_as_few_of_300000_blocks_as_of_30(operation: str) -> None:
    looks = []
    for size in (30, 300_000):
        blocks = [CountedBlock(i) for i in range(size)]
        queue = FreeBlockQueue(blocks)
        middle = blocks[size // 2]
        if operation in ("append", "prepend"):
            queue.remove(middle)
        CountedBlock.looks = 0
        getattr(queue, operation)(*[] if operation == "popleft" else [middle])
        looks.append(CountedBlock.looks)
    assert looks[0] == looks[1] < 10


def test_a_hit_a_free_and_an_eviction_in_300000_blocks_cost_as_much_as_in_30() -> None:
    work = []
    for size in (30, 300_000):
        pool = BlockPool(size)
        taken = pool.allocate(size)
        for block in taken:
            pool.cache(block, name(block.block_id))
        pool.free(taken)
        hit = pool.get_cached_block(name(size // 2))
        assert hit is not None
        work.append(
            [
                lines_run(lambda pool=pool, hit=hit: pool.touch([hit])),
                lines_run(lambda pool=pool, hit=hit: pool.free([hit])),
                lines_run(lambda pool=pool: pool.allocate(3)),
            ]
        )
    assert work[0] == work[1]


def test_a_freed_block_stays_hittable_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, name(1))
    pool.cache(second, name(2))
    pool.free([first])
    assert pool.get_cached_block(name(1)) is first

    (again,) = pool.allocate(1)

    assert again is first
    assert pool.get_cached_block(name(1)) is None
    assert pool.get_cached_block(name(2)) is second


def test_the_suffix_is_evicted_before_the_prefix() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache(block, name(block.block_id))
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]


def test_the_least_recently_freed_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in [*old, *new]:
        pool.cache(block, name(block.block_id))
    pool.free(old)
    pool.free(new)
    pool.touch([old[0]])
    pool.free([old[0]])
    order = [old[1], new[1], new[0], old[0]]
    assert list(walk(pool)) == [b.block_id for b in order]


def test_blocks_that_nothing_names_are_reused_before_any_that_can_be_hit() -> None:
    pool = BlockPool(4)
    named, nameless = pool.allocate(2), pool.allocate(2)
    for block in named:
        pool.cache(block, name(block.block_id))
    pool.free(named)
    pool.free(nameless)
    assert {b.block_id for b in pool.allocate(2)} == {b.block_id for b in nameless}
    assert pool.get_cached_block(name(named[0].block_id)) is named[0]


def test_a_block_in_use_twice_is_free_only_after_both_let_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 0
    pool.free([block])
    assert pool.num_free == 1


def test_equal_content_in_two_blocks_keeps_the_first_name() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, name(1))
    pool.cache(second, name(1))
    assert pool.get_cached_block(name(1)) is first
    assert second.block_hash is None
