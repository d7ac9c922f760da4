"""Several prompts of one call as one stream of news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from diptych.services.router.inference import GenerationCall, Inference
from diptych.text.output_processor import OutputDelta, RequestState

_QUEUE = 64


class News(NamedTuple):
    """What is new of one choice."""

    choice: int
    state: RequestState
    delta: OutputDelta


@asynccontextmanager
async def run_calls(
    inference: Inference, calls: Sequence[GenerationCall]
) -> AsyncIterator[AsyncIterator[News]]:
    """Run all calls at once. Leaving the block, or the failure of one, cancels them all."""
    source = _one(inference, calls[0]) if len(calls) == 1 else _many(inference, calls)
    async with aclosing(source) as news:
        yield news


async def _one(
    inference: Inference, call: GenerationCall, choice: int = 0
) -> AsyncGenerator[News, None]:
    async with inference.generate(call) as generation:
        async for delta in generation.deltas:
            yield News(choice, generation.state, delta)


async def _many(
    inference: Inference, calls: Sequence[GenerationCall]
) -> AsyncGenerator[News, None]:
    inference.check_capacity(len(calls))
    queue: asyncio.Queue[News | Exception | None] = asyncio.Queue(_QUEUE)

    async def pump(index: int, call: GenerationCall) -> None:
        try:
            async with aclosing(_one(inference, call, index)) as news:
                async for item in news:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index, call)) for index, call in enumerate(calls)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
