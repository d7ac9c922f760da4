"""KV straight from a prefill engine's memory into a decode engine's: real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diptych.config import EngineConfig
from diptych.engine.request import FinishReason
from tests.connectors.direct_pair import PREFILL, Pair, Worker, running_pair
from tests.engine.make_requests import make_request
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.anyio
PROMPT = [(7 * i) % 250 for i in range(150)]
SAMPLING = {"max_tokens": 8, "temperature": 0.9, "seed": 3, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[int]:
    return asyncio.run(answer_of_one_engine(model))


async def answer_of_one_engine(model: Path) -> list[int]:
    worker = Worker("alone")
    await worker.start(
        EngineConfig(model=str(model), dtype="float32", max_model_len=512, num_threads=1)
    )
    listening = asyncio.create_task(worker.listen())
    try:
        await worker.client.submit(make_request("a", PROMPT, **SAMPLING))
        await worker.ended("a")
    finally:
        await worker.client.close()
        await listening
    return [token for _, token in worker.tokens["a"]]


async def hand_over(pair: Pair, name: str = "r") -> list[int]:
    await pair.submit(name, PROMPT, **SAMPLING)
    await pair.ended(name)
    assert pair.prefill.commits[name].num_tokens == len(PROMPT), pair.decode.failures
    assert pair.decode.ends[name] is FinishReason.LENGTH
    await pair.all_free()
    return pair.answer(name)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_the_answer_is_that_of_one_engine(
    model: Path, alone: list[int], transport: str
) -> None:
    settings = {"transports": transport}
    async with running_pair(model, prefill=settings, decode=settings) as pair:
        assert await hand_over(pair) == alone
        # the first token is prefill's, all others are decode's
        assert [position for position, _ in pair.prefill.tokens["r"]] == [0]
        assert pair.decode.client.stats.prompt_tokens_local_compute == 0
        assert pair.decode.client.stats.prompt_tokens_external_kv_transfer == len(PROMPT)
        link = pair.decode.links[PREFILL]
        assert link.usable
        assert link.transport == transport
