"""Ending tasks: nothing of theirs, and nothing of who ends them, is lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from diptych.tasks import end_task

pytestmark = pytest.mark.anyio


async def test_who_is_cancelled_while_ending_a_task_is_cancelled() -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    may_end.set()

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    owner = asyncio.create_task(end_task(task))
    await ending.wait()
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert task.done(), "and still the task is over before its owner goes on"


async def test_what_a_task_raised_is_logged_when_it_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks() -> None:
        raise ValueError("it broke")

    task = asyncio.create_task(breaks(), name="the loop")
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await end_task(task)
    assert "the loop failed" in caplog.text
    assert "it broke" in caplog.text
    await end_task(None)
