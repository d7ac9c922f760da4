"""The load generator against small servers that answer as servers do, well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from diptych.bench.serve_client import Answer, StreamClient
from diptych.bench.serve_run import run_load

pytestmark = pytest.mark.anyio
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def client_of(handler: Handler, timeout_s: float = 60.0) -> AsyncIterator[StreamClient]:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
    try:
        async with aiohttp.ClientSession() as session:
            yield StreamClient(session, url, {}, timeout_s)
    finally:
        await runner.cleanup()


def streaming(*events: object, broken: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        if broken and request.transport is not None:
            request.transport.abort()
        return response

    return handler


def tokens(*ids: int) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids)}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


async def test_an_answer_has_its_tokens_their_times_and_the_usage() -> None:
    async with client_of(streaming(tokens(4), tokens(5, 6), USAGE, "[DONE]")) as client:
        answer = await client.send(b"{}")
    assert answer.error is None
    assert answer.token_ids == [4, 5, 6]
    assert answer.piece_tokens == [1, 2]
    assert answer.output_len == 3
    assert answer.prompt_tokens == 7
    assert answer.start_s < answer.piece_s[0] <= answer.piece_s[1] <= answer.end_s


async def refusing(request: web.Request) -> web.Response:
    body = {"error": {"message": "no", "type": "rate_limit", "code": "full"}}
    return web.json_response(body, status=429)


async def unreadable(request: web.Request) -> web.Response:
    return web.Response(status=502, text="<html>")


ERROR = {"error": {"message": "gone", "type": "internal_error", "code": None}}


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (refusing, "429 full"),
        (unreadable, "502 error"),
        (streaming(tokens(1), ERROR, "[DONE]"), "stream internal_error"),
        (streaming(tokens(1)), "stream ended early"),
        (streaming(tokens(1), broken=True), "ClientPayloadError"),
        (streaming(USAGE, "[DONE]"), "no tokens"),
        (streaming("nonsense"), "stream InvalidRequestError"),
    ],
    ids=["refused", "unreadable", "error event", "cut", "broken", "empty", "nonsense"],
)
async def test_every_failure_has_a_name(handler: Handler, name: str) -> None:
    async with client_of(handler) as client:
        assert (await client.send(b"{}")).error == name


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    async with client_of(never, timeout_s=0.2) as client:
        assert (await client.send(b"{}")).error == "timeout"


class Counting:
    """Notes how many requests are under way; each goes on until the next one wants to come."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.seen: list[bytes] = []

    async def send(self, body: bytes) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        self.seen.append(body)
        await asyncio.sleep(0.01)
        self.now -= 1
        return Answer(text=[body.decode()])


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    client = Counting()
    bodies = [str(number).encode() for number in range(9)]

    run = await run_load(client, bodies, [0.0] * 9, max_concurrency=3)

    assert client.most == 3
    assert ["".join(answer.text) for answer in run.answers] == [str(n) for n in range(9)]
    assert max(run.queued_s) > 0.005, "waiting for a place is not the load generator's lateness"


async def test_requests_are_sent_in_order_and_none_before_it_is_due() -> None:
    client = Counting()
    due_s = [0.0, 0.01, 0.03]

    run = await run_load(client, [b"0", b"1", b"2"], due_s)

    assert client.seen == [b"0", b"1", b"2"]
    assert all(late >= 0 for late in run.late_s)
    assert run.end_s - run.begin_s >= 0.03
