"""The admin port and the way a service process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import Counter

from diptych.errors import ConfigError
from diptych.observe import IDLE_S, AdminServer, Status, new_registry, shorten_broken_http

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.anyio
async def test_probes_and_metrics_answer() -> None:
    registry = new_registry()
    Counter("diptych:things", "Things.", registry=registry).inc(3)
    state = {"ready": Status(False, "the engine is loading")}
    async with (
        AdminServer("127.0.0.1", 0, registry=registry, ready=lambda: state["ready"]) as admin,
        aiohttp.ClientSession(f"http://127.0.0.1:{admin.port}") as http,
    ):
        async with http.get("/livez") as answer:
            assert answer.status == 200
        async with http.get("/readyz") as answer:
            assert (answer.status, await answer.text()) == (503, "the engine is loading\n")
        state["ready"] = Status(True)
        async with http.get("/readyz") as answer:
            assert answer.status == 200
        async with http.get("/metrics") as answer:
            text = await answer.text()
            assert "diptych:things_total 3.0" in text
            assert "process_resident_memory_bytes" in text


@pytest.mark.anyio
async def test_broken_http_is_one_line_that_does_not_repeat_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "filters", [shorten_broken_http])
    registry = new_registry()
    async with AdminServer("127.0.0.1", 0, registry=registry, ready=lambda: Status(True)) as admin:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nSECRET WORDS\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()

    assert "a client sent broken HTTP: Bad" in caplog.text
    assert "SECRET" not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_without_a_whole_header_is_not_kept(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.observe.IDLE_S", 0.3)
    registry = new_registry()
    async with AdminServer("127.0.0.1", 0, registry=registry, ready=lambda: Status(True)) as admin:
        reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
        writer.write(said)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.anyio
async def test_an_answer_may_take_longer_than_a_connection_may_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.observe.IDLE_S", 0.3)
    registry = new_registry()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (b"first ", b"last"):
            await response.write(part)
            await asyncio.sleep(0.6)
        return response

    async with (
        AdminServer(
            "127.0.0.1",
            0,
            registry=registry,
            ready=lambda: Status(True),
            routes=[web.get("/slow", slow)],
        ) as admin,
        aiohttp.ClientSession(f"http://127.0.0.1:{admin.port}") as http,
        http.get("/slow") as answer,
    ):
        assert await answer.text() == "first last"


def test_a_connection_is_kept_longer_than_proxies_keep_theirs() -> None:
    assert IDLE_S > 60


@pytest.mark.anyio
async def test_an_admin_port_in_use_is_named() -> None:
    registry = new_registry()
    async with AdminServer("127.0.0.1", 0, registry=registry, ready=lambda: Status(True)) as first:
        second = AdminServer("127.0.0.1", first.port, registry=registry, ready=lambda: Status(True))
        with pytest.raises(ConfigError, match=f"{first.port}.*in use"):
            await second.start()


SERVICE = """
import asyncio, sys
from diptych.errors import ConfigError
from diptych.observe import run_until_signal

async def main(stop):
    if "fail" in sys.argv:
        raise ConfigError("cannot listen on 127.0.0.1:1: the port is in use")
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    if "slow" in sys.argv:
        await asyncio.sleep(60)

run_until_signal("test", main)
"""


def start(*arguments: str, ignore_sigint: bool = False) -> subprocess.Popen[str]:
    # The shell sets the signal: a function run between fork and exec (`preexec_fn`) would run in a
    # copy of this process, whose gRPC threads are gone and whose fork handlers can end it.
    shell = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"] if ignore_sigint else []
    return subprocess.Popen(
        [*shell, sys.executable, "-c", SERVICE, *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """What a service says first; where it says nothing, how it ended and its errors."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        errors = process.stderr.read()
        pytest.fail(f"ended with {process.wait(60)} before its first line: {errors}")
    return line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_cleanly_even_where_sigint_was_ignored(
    number: signal.Signals,
) -> None:
    with start(ignore_sigint=True) as process:
        assert process.stdout is not None
        assert first_line(process) == "up\n"
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stdout.read() == "draining\n"


def test_a_second_signal_stops_a_slow_drain() -> None:
    with start("slow") as process:
        assert process.stdout is not None
        assert first_line(process) == "up\n"
        process.terminate()
        assert process.stdout.readline() == "draining\n"
        began = time.monotonic()
        process.terminate()
        assert process.wait(60) == 0
        assert time.monotonic() - began < 5


def test_a_failure_is_one_line_and_a_code() -> None:
    with start("fail") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err == "diptych test: cannot listen on 127.0.0.1:1: the port is in use\n"
