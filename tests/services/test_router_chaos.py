"""Many requests, clients that leave, workers that die, restart and lose streams: every answer is
whole, and in the end nobody holds anything."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from diptych.services.router.dispatch import DispatchTimes
from tests.services.fake_worker import DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    Running,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]
NUM_REQUESTS = 60
TOKENS_BETWEEN = 120  # losses


class SlowWorker(FakeWorker):
    """One that takes a moment for every token."""

    num_said = 0

    async def say(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0.004)
        self.num_said += 1
        await super().say(*args, **kwargs)


@pytest.mark.parametrize("seed", [1, 2])
async def test_answers_stay_whole_whatever_happens(tmp_path: Path, seed: int) -> None:
    model = tiny_directory(tmp_path)
    script = tiny_script(model)
    rng = random.Random(seed)
    workers = [SlowWorker(f"p{i}", PREFILL, script) for i in (1, 2)]
    workers += [SlowWorker(f"d{i}", DECODE, script) for i in (1, 2)]
    times = DispatchTimes(first_token_s=60.0, handoff_s=60.0, recovery_s=60.0)
    async with running_router(model, workers, dispatch_times=times) as router:
        hurting = asyncio.create_task(_hurt(workers, rng))
        try:
            asking = [_ask(router, leaves=rng.random() < 0.3, rng=rng) for _ in range(NUM_REQUESTS)]
            answers = await asyncio.gather(*asking)
        finally:
            hurting.cancel()
            await asyncio.gather(hurting, return_exceptions=True)
        assert {answer for answer in answers if answer is not None} == {ANSWER}
        await until(lambda: not any(worker.running for worker in workers))
        running = 'vllm:num_requests_running{model_name="tiny"}'

        async def is_idle() -> bool:
            return await router.metric(running) == 0

        await until(is_idle)


async def _ask(router: Running, *, leaves: bool, rng: random.Random) -> str | None:
    """The text of one stream; None where the client leaves in its middle."""
    await asyncio.sleep(rng.random())
    body = {"prompt": "Hello", "max_tokens": 64, "stream": True}
    timeout = aiohttp.ClientTimeout(total=0.05 * rng.random() + 0.001 if leaves else 150)
    text = ""
    try:
        async with router.session.post(
            f"{router.url}/v1/completions", json=body, timeout=timeout
        ) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    except TimeoutError:
        return None
    return text


async def _hurt(workers: list[SlowWorker], rng: random.Random) -> None:
    """Every so many tokens one worker loses its streams or its life: with the work done, not with
    the time, so that each request meets as much of it on a slow machine."""
    while True:
        enough = sum(worker.num_said for worker in workers) + TOKENS_BETWEEN
        await until(lambda enough=enough: sum(worker.num_said for worker in workers) >= enough)
        worker = rng.choice(workers)
        if rng.random() < 0.5:
            await worker.break_streams()
        else:
            await worker.restart()
