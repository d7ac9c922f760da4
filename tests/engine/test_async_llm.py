import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, AsyncLLM, SamplingParams
from diptych.errors import EngineDeadError, InvalidRequestError, ModelLoadError
from diptych.outputs import RequestOutput
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.anyio
ARGUMENTS: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 256, "num_threads": 1}
PROMPTS = ["the capital of", "What is the weather in the mountains?", "one, two,", "Hello"]
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def llm(model: str, anyio_backend: str) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(model, **ARGUMENTS) as llm:
        yield llm


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = None
    async for output in outputs:
        assert found is None or not found.finished
        found = output
    assert found is not None
    assert found.finished
    return found


async def is_idle(llm: AsyncLLM) -> bool:
    """Whether every process has let go of all requests, within a minute."""
    assert llm._engine is not None
    client: Any = llm._engine._client
    for _ in range(6000):
        stats = client.stats
        if stats.num_running == stats.num_waiting == 0 and stats.num_kv_blocks:
            return bool(stats.num_free_kv_blocks == stats.num_kv_blocks) and not llm._engine._calls
        await asyncio.sleep(0.01)
    return False


async def test_answers_are_those_of_llm(llm: AsyncLLM, model: str) -> None:
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=12, logprobs=1)
        for i, t in enumerate((0.0, 1.0, 0.0, 0.7))
    ]
    calls = [
        last(llm.generate(prompt, p, f"r{i}"))
        for i, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))
    ]
    streamed = await asyncio.gather(*calls)
    with LLM(model, **ARGUMENTS) as offline:
        wanted = offline.generate(PROMPTS, params, use_tqdm=False)
    assert [o.request_id for o in streamed] == ["r0", "r1", "r2", "r3"]
    for got, want in zip(streamed, wanted, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].text == want.outputs[0].text
        assert got.outputs[0].cumulative_logprob == pytest.approx(
            want.outputs[0].cumulative_logprob, abs=1e-3
        )


async def test_each_item_is_the_answer_so_far(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts = [o.outputs[0].text async for o in llm.generate("Hello", params)]
    assert len(texts) > 1
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


async def test_leaving_the_loop_aborts_the_request(llm: AsyncLLM) -> None:
    outputs = llm.generate("Hello", LONG)
    async for _ in outputs:
        break
    await outputs.aclose()
    assert await is_idle(llm)


async def test_cancelling_the_reader_aborts_the_request(llm: AsyncLLM) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("Hello", LONG):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await is_idle(llm)


async def test_abort_by_id_ends_the_stream_with_what_there_is(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate("Hello", LONG, "mine"):
        outputs.append(output)
        await llm.abort("mine")
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 0 < len(outputs[-1].outputs[0].token_ids) < 900
    assert await is_idle(llm)
    await llm.abort("unknown")


async def test_a_stop_string_ends_the_engines_work(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    text = (await last(llm.generate("Hello", params))).outputs[0].text
    stop = text[4:7]
    cut = (await last(llm.generate("Hello", LONG.replace(stop=[stop])))).outputs[0]
    assert (cut.text, cut.stop_reason) == (text[: text.index(stop)], stop)
    assert await is_idle(llm)


async def test_bad_input_and_used_ids_are_refused(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        await last(llm.generate(""))
    first = llm.generate("Hello", LONG, "same")
    await anext(first)
    with pytest.raises(InvalidRequestError, match="same is in use"):
        await last(llm.generate("Hello", LONG, "same"))
    await first.aclose()
    assert await is_idle(llm)


async def test_a_dead_engine_fails_its_requests_and_later_ones(model: str) -> None:
    llm = AsyncLLM(model, **ARGUMENTS)
    outputs = llm.generate("Hello", LONG)
    await anext(outputs)
    assert llm._engine is not None
    client: Any = llm._engine._client
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        await last(llm.generate("Hello"))
    await llm.shutdown()


async def test_shutdown_fails_what_runs_and_is_final(model: str) -> None:
    llm = AsyncLLM(model, **ARGUMENTS)
    outputs = llm.generate("Hello", LONG)
    await anext(outputs)
    await llm.shutdown()
    await llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.start()


async def test_a_model_that_cannot_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        await AsyncLLM(str(tmp_path / "none")).start()
