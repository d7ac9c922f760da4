"""The arena's runs never overlap, its bytes add up, and freed neighbours become one hole."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.services.kvstore.arena import Arena

POOL = 64 * 4096


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.integers(1, 9 * 4096), st.integers(-40, -1)), max_size=80))
def test_runs_never_overlap_and_bytes_add_up(steps: list[int]) -> None:
    """A positive step allocates that many bytes, a negative one frees the run of that index."""
    arena = Arena(POOL)
    runs: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            offset = arena.allocate(step)
            assert (offset is None) == (arena.rounded(step) > largest_gap(runs))
            if offset is not None:
                runs.append((offset, arena.rounded(step)))
        elif runs:
            arena.free(runs.pop(step % len(runs))[0])
        assert arena.used_bytes == sum(size for _, size in runs)
        assert arena.largest_hole == largest_gap(runs)
        ordered = sorted(runs)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ordered))
        assert all(offset % 4096 == 0 and offset + size <= POOL for offset, size in runs)
    for offset, _ in runs:
        arena.free(offset)
    assert arena.allocate(POOL) == 0


def largest_gap(runs: list[tuple[int, int]]) -> int:
    """The meaning of `largest_hole`, the slow way."""
    end, gap = 0, 0
    for offset, size in [*sorted(runs), (POOL, 0)]:
        gap = max(gap, offset - end)
        end = offset + size
    return gap


def test_a_hole_of_the_right_size_is_taken_before_a_larger_one() -> None:
    arena = Arena(POOL)
    first, small, _last = (arena.allocate(n * 4096) for n in (8, 2, 1))
    assert first is not None
    assert small is not None
    arena.free(first)
    assert arena.allocate(8 * 4096) == first
    arena.free(small)
    assert arena.allocate(2 * 4096) == small


def test_what_was_not_allocated_cannot_be_freed() -> None:
    arena = Arena(POOL)
    assert arena.allocate(4096) == 0
    arena.free(0)
    with pytest.raises(KeyError):
        arena.free(0)
    with pytest.raises(ValueError, match="multiple"):
        Arena(POOL + 1)
