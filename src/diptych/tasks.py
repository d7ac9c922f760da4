"""Coroutines that live and end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, end the others, and raise what that one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it is over; what it raised is logged.

    A cancellation of the caller is the caller's: `suppress(CancelledError)` around `await task`
    would lose it.
    """
    if task is None:
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
