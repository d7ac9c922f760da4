"""Sends requests when they are due, and says how late it was itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from diptych.bench.serve_client import Answer

# A loop's timers are good to a millisecond: for the rest of the time the loop is kept turning.
_TIMER_S = 0.002


class Client(Protocol):
    """Who sends."""

    async def send(self, body: bytes) -> Answer:
        """One request, to its end."""
        ...


@dataclass(slots=True)
class Run:
    """What came of a load; the lists are in the order of the requests.

    `late_s`: how much after it was due a request was taken up, which is the load generator's own
    fault. `queued_s`: how long it then waited for its place under the limit of concurrency.
    """

    begin_s: float
    end_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    queued_s: list[float] = field(default_factory=list)


async def run_load(
    client: Client,
    bodies: Sequence[bytes],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Send each body when it is due, in seconds from now, and wait for all answers.

    Args:
        due_s: ascending.
        max_concurrency: most requests under way; one that is due beyond that waits.
        progress: is told after each answer how many there are.
    """
    places: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    )
    run = Run(begin_s=time.perf_counter())
    run.late_s = [0.0] * len(bodies)
    run.queued_s = [0.0] * len(bodies)
    done = 0

    async def one(index: int) -> Answer:
        nonlocal done
        taken_s = time.perf_counter()
        run.late_s[index] = taken_s - run.begin_s - due_s[index]
        async with places:
            run.queued_s[index] = time.perf_counter() - taken_s
            answer = await client.send(bodies[index])
        done += 1
        progress(done)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index in range(len(bodies)):
            await _until(run.begin_s + due_s[index])
            tasks.append(group.create_task(one(index)))
    run.answers = [task.result() for task in tasks]
    run.end_s = time.perf_counter()
    return run


async def _until(at_s: float) -> None:
    left = at_s - time.perf_counter()
    if left > _TIMER_S:
        await asyncio.sleep(left - _TIMER_S)
    while time.perf_counter() < at_s:
        await asyncio.sleep(0)
