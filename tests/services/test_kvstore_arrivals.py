"""Readers of the store who wait for objects: woken by the first, and bounded."""

from __future__ import annotations

import asyncio

import pytest

from diptych.services.kvstore.arrivals import MAX_KEYS, Arrivals

pytestmark = pytest.mark.anyio
LONG_S = 600.0


async def begun(arrivals: Arrivals, keys: list[bytes], wait_s: float) -> asyncio.Task[None]:
    task = asyncio.create_task(arrivals.wait(keys, wait_s))
    await asyncio.sleep(0)
    return task


async def test_whoever_waits_for_one_of_what_came_is_woken_and_leaves_nothing() -> None:
    arrivals = Arrivals()
    woken = [
        await begun(arrivals, [b"a", b"b", b"a"], LONG_S),
        await begun(arrivals, [b"b"], LONG_S),
    ]
    asleep = await begun(arrivals, [b"c"], LONG_S)
    arrivals.note([b"b", b"nobody's"])
    await asyncio.gather(*woken)
    assert not asleep.done()
    asleep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asleep
    assert not arrivals.awaited


async def test_beyond_the_bound_time_is_waited_for_alone() -> None:
    arrivals = Arrivals()
    many = [number.to_bytes(4, "big") for number in range(MAX_KEYS)]
    full = await begun(arrivals, many, LONG_S)
    await arrivals.wait([b"one more"], 0.001)
    late = await begun(arrivals, [b"late"], LONG_S)
    arrivals.note([b"late"])
    await asyncio.sleep(0)
    assert not late.done()
    arrivals.note(many[-1:])
    await full
    heard = await begun(arrivals, [b"late"], LONG_S)  # there is room again
    arrivals.note([b"late"])
    await heard
    late.cancel()
    assert not arrivals.awaited
