"""An allocator of runs of bytes in one pool: offsets only, it never touches the bytes."""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE_BYTES = 4096


class Arena:
    """Best fit, lowest offset among equals, neighbours merged when freed.

    KV objects come in few sizes, which best fit keeps from splitting one another's holes; low
    offsets first keeps the touched part of the pool small. O(log n) and a short memmove a call.
    """

    def __init__(self, pool_bytes: int, align_bytes: int = PAGE_BYTES) -> None:
        if pool_bytes <= 0 or pool_bytes % align_bytes:
            raise ValueError(f"the pool must be a positive multiple of {align_bytes} bytes")
        self.pool_bytes = pool_bytes
        self.align_bytes = align_bytes
        self.used_bytes = 0
        self._taken: dict[int, int] = {}  # offset: size
        self._holes: list[tuple[int, int]] = [(pool_bytes, 0)]  # (size, offset), sorted
        self._hole_at: dict[int, int] = {0: pool_bytes}  # offset: size
        self._hole_ending: dict[int, int] = {pool_bytes: 0}  # end: offset

    def rounded(self, num_bytes: int) -> int:
        """Bytes that an object of `num_bytes` takes."""
        return -(-num_bytes // self.align_bytes) * self.align_bytes

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest allocation that would succeed."""
        return self._holes[-1][0] if self._holes else 0

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a run of at least `num_bytes` (above 0); None where no hole is long enough."""
        size = self.rounded(num_bytes)
        index = bisect_left(self._holes, (size, 0))
        if index == len(self._holes):
            return None
        hole_size, offset = self._holes[index]
        self._remove_hole(offset, hole_size)
        if hole_size > size:
            self._add_hole(offset + size, hole_size - size)
        self._taken[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give back the run at `offset`.

        Raises:
            KeyError: nothing was allocated there.
        """
        size = self._taken.pop(offset)
        self.used_bytes -= size
        before = self._hole_ending.get(offset)
        if before is not None:
            size += offset - before
            self._remove_hole(before, offset - before)
            offset = before
        after = self._hole_at.get(offset + size)
        if after is not None:
            self._remove_hole(offset + size, after)
            size += after
        self._add_hole(offset, size)

    def _add_hole(self, offset: int, size: int) -> None:
        insort(self._holes, (size, offset))
        self._hole_at[offset] = size
        self._hole_ending[offset + size] = offset

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, offset))]
        del self._hole_at[offset]
        del self._hole_ending[offset + size]
