import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import diptych
from diptych.config import EngineConfig, KVTransferConfig
from diptych.engine.core_client import EngineCoreClient
from diptych.engine.request import EngineCoreOutputs, FinishReason
from diptych.errors import (
    CapacityError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
)
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request

pytestmark = pytest.mark.anyio
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_queued_reqs=8,
    kv_transfer_config=KVTransferConfig(kv_connector_extra_config={"path": "/x", "n": [1, 2]}),
)


@pytest.fixture(autouse=True)
def _importable_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@asynccontextmanager
async def engine(factory: str = "make_core") -> AsyncIterator[EngineCoreClient]:
    client = EngineCoreClient(factory=f"fake_executor:{factory}")
    await client.start(CONFIG, startup_timeout_s=150)
    try:
        yield client
    finally:
        await client.close()


async def ends(client: EngineCoreClient, count: int) -> dict[str, tuple[list[int], FinishReason]]:
    """Tokens and finish reason of the first `count` requests that end."""
    tokens: dict[str, list[int]] = {}
    ended: dict[str, tuple[list[int], FinishReason]] = {}
    async for outputs in client.outputs():
        for request_id, new, reason in entries(outputs):
            tokens.setdefault(request_id, []).extend(new)
            if reason:
                ended[request_id] = (tokens[request_id], FinishReason(reason))
        if len(ended) >= count:
            break
    return ended


def entries(outputs: EngineCoreOutputs) -> list[tuple[str, list[int], int]]:
    taken, listed = 0, []
    for i, request_id in enumerate(outputs.request_ids):
        count = outputs.token_counts[i]
        new = outputs.token_ids[taken : taken + count]
        listed.append((request_id, new, outputs.finish_reasons[i]))
        taken += count
    return listed


async def drain(client: EngineCoreClient, seen: list[EngineCoreOutputs]) -> None:
    async for outputs in client.outputs():
        seen.append(outputs)


def is_gone(pid: int) -> bool:
    """Whether the process has ended, if perhaps nobody has collected it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_requests_go_in_and_answers_come_out_and_the_process_ends() -> None:
    async with engine() as client:
        assert client.info.num_kv_blocks == 64
        assert client.info.kv_namespace == (b"fake" * 8).hex()
        assert client.info.max_model_len == 1024
        for i in range(6):
            await client.submit(make_request(str(i), [i, 2, 3], max_tokens=5))
        ended = await ends(client, 6)
        pid = client.pid
    for i in range(6):
        assert ended[str(i)] == (expected_output([i, 2, 3], 5), FinishReason.LENGTH)
    assert client.stats.num_free_kv_blocks == 64
    assert pid is not None
    assert is_gone(pid)


async def test_an_idle_engine_burns_no_time() -> None:
    async with engine() as client:
        await client.submit(make_request("a", [1, 2, 3]))
        await ends(client, 1)
        async with asyncio.timeout(60):  # it may have something to end first
            while True:
                before = _cpu_ticks(client)
                await asyncio.sleep(0.3)
                if _cpu_ticks(client) - before <= 1:
                    break


def _cpu_ticks(client: EngineCoreClient) -> int:
    fields = Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_an_abort_reaches_an_engine_that_is_busy() -> None:
    async with engine("make_slow_core") as client:
        await client.submit(make_request("a", [1, 2, 3], max_tokens=900))
        await anext(aiter(client.outputs()))
        await client.abort(["a", "unknown"])
        ended = await ends(client, 1)
    assert ended["a"][1] is FinishReason.ABORT
    assert len(ended["a"][0]) < 900
    assert client.stats.num_free_kv_blocks == 64


async def test_a_request_that_can_never_run_is_refused_before_it_is_sent() -> None:
    async with engine() as client:
        with pytest.raises(InvalidRequestError):
            await client.submit(make_request("a", [1] * 1024))


async def test_an_id_in_use_is_refused_by_an_error_entry() -> None:
    async with engine("make_slow_core") as client:
        await client.submit(make_request("a", [1, 2], max_tokens=900))
        await client.submit(make_request("a", [1, 2], max_tokens=900))
        ended = await ends(client, 1)
    assert ended["a"] == ([], FinishReason.ERROR) or ended["a"][1] is FinishReason.ERROR


async def test_more_requests_than_queue_and_places_are_refused_by_name() -> None:
    async with engine("make_slow_core") as client:
        for i in range(12):
            await client.submit(make_request(str(i), [1, 2], max_tokens=900))
        with pytest.raises(CapacityError):
            await client.submit(make_request("last", [1, 2]))
        await client.abort([str(i) for i in range(12)])
        await ends(client, 12)
        await client.submit(make_request("last", [1, 2]))
        assert (await ends(client, 1))["last"][0] == expected_output([1, 2], 4)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("find_no_model", ModelLoadError, "smollm2 is not there"),
        ("break_while_building", EngineError, "ZeroDivisionError: a slip"),
        ("die_while_building", EngineDeadError, "status 7"),
    ],
)
async def test_what_keeps_an_engine_from_starting_is_raised_by_name(
    factory: str, error: type[Exception], message: str
) -> None:
    client = EngineCoreClient(factory=f"fake_executor:{factory}")
    with pytest.raises(error, match=message) as raised:
        await client.start(CONFIG, startup_timeout_s=150)
    assert type(raised.value) is error
    with pytest.raises(EngineDeadError):
        await client.submit(make_request("a", [1]))


async def test_an_engine_that_does_not_get_ready_is_ended_at_the_deadline() -> None:
    client = EngineCoreClient(factory="fake_executor:build_for_ever")
    with pytest.raises(DeadlineError):
        await client.start(CONFIG, startup_timeout_s=1.0)
    assert client.pid is not None
    assert is_gone(client.pid)


async def test_an_engine_that_fails_ends_its_requests_and_then_says_why() -> None:
    async with engine("make_failing_core") as client:
        await client.submit(make_request("a", [1, 2, 3]))
        seen: list[EngineCoreOutputs] = []
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await drain(client, seen)
        reasons = [reason for outputs in seen for reason in outputs.finish_reasons]
        assert reasons == [FinishReason.UNSPECIFIED, FinishReason.ERROR]
        assert "the device is gone" in seen[-1].errors[0]
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await client.submit(make_request("b", [1]))


async def test_an_engine_that_is_killed_is_noticed_at_once() -> None:
    async with engine("make_slow_core") as client:
        await client.submit(make_request("a", [1, 2, 3], max_tokens=900))
        await anext(aiter(client.outputs()))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="status -9"):
            await drain(client, [])
        assert not client.is_alive


async def test_an_engine_ends_when_its_service_process_does() -> None:
    program = """
import asyncio, os, sys
from diptych.config import EngineConfig
from diptych.engine.core_client import EngineCoreClient

async def main():
    client = EngineCoreClient(factory="fake_executor:make_core")
    await client.start(EngineConfig())
    print(client.pid, flush=True)
    os._exit(1)

asyncio.run(main())
"""
    roots = [str(Path(diptych.__file__).parents[1]), str(Path(__file__).parent)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
    )
    printed, _ = await process.communicate()
    deadline = time.monotonic() + 60
    while not is_gone(int(printed)):
        assert time.monotonic() < deadline, "the engine process outlives its parent"
        await asyncio.sleep(0.02)


async def test_the_service_side_imports_no_torch() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, diptych.engine.core_client; sys.exit('torch' in sys.modules)",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert await process.wait() == 0
