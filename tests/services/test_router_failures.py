"""Workers die, streams break, clients leave: answers stay whole, nobody computes for no one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from diptych.services.router import gateway
from diptych.services.router.dispatch import DispatchTimes
from tests.services.fake_worker import AGGREGATED, DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    Running,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]
PATH = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 64, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("failures"))


async def read_stream(
    router: Running, body: Any = BODY, heard: list[int] | None = None
) -> tuple[str, list[int], list[Any]]:
    """Text, token ids and error events of a stream. The ids are in `heard` as soon as they come:
    what has come to the client has certainly come to the router."""
    ids: list[int] = [] if heard is None else heard
    text, errors, done = "", [], False
    async with router.session.post(f"{router.url}{PATH}", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            assert not (done and line.strip()), "nothing follows the end"
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in (event.get("choices") or [])[:1]:
                    text += choice["text"]
                    ids.extend(choice["token_ids"])
                errors += [event["error"]] if "error" in event else []
            done |= line == b"data: [DONE]\n"
    assert done
    return text, ids, errors


async def test_a_decode_worker_that_dies_mid_stream_is_replaced_without_loss(model: Path) -> None:
    script = tiny_script(model)
    prefill = FakeWorker("p1", PREFILL, script)
    decodes = [FakeWorker(f"d{i}", DECODE, script) for i in (1, 2)]
    for worker in decodes:
        worker.pause_at = 6
    async with running_router(model, [prefill, *decodes]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: any(d.submits for d in decodes))
        first, second = sorted(decodes, key=lambda d: not d.submits)
        second.resume.set()
        await until(lambda: len(first._frames) == 5)
        await first.die()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])
        (again,) = second.submits
        sent = list(again.output_token_ids)
        assert 1 <= len(sent) <= 6
        assert sent == script[: len(sent)]
        assert again.handoff_in == first.submits[0].handoff_in
        assert again.ticket.epoch == first.submits[0].ticket.epoch + 1
        assert len(prefill.submits) == 1


async def test_a_prefill_worker_that_dies_before_token_1_is_replaced(model: Path) -> None:
    script = tiny_script(model)
    prefills = [FakeWorker(f"p{i}", PREFILL, script) for i in (1, 2)]
    decode = FakeWorker("d1", DECODE, script)
    for worker in prefills:
        worker.pause_at = 0
    async with running_router(model, [*prefills, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: any(p.submits for p in prefills))
        first, second = sorted(prefills, key=lambda p: not p.submits)
        second.resume.set()
        await first.die()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])
        assert second.submits[0].handoff_out
        assert second.submits[0].ticket.epoch == 2


async def test_a_prefill_worker_that_dies_before_the_hand_off_leaves_decode_alone(
    model: Path,
) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    prefill.commits = False
    async with running_router(model, [prefill, decode]) as router:
        heard: list[int] = []
        reading = asyncio.create_task(read_stream(router, heard=heard))
        await until(lambda: heard)
        await prefill.die()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])
        (submit,) = decode.submits
        assert not submit.HasField("handoff_in")
        assert list(submit.output_token_ids) == script[:1]


async def test_a_hand_off_that_never_comes_is_not_waited_for(model: Path) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    prefill.commits = False
    times = DispatchTimes(handoff_s=0.2)
    async with running_router(model, [prefill, decode], dispatch_times=times) as router:
        text, ids, errors = await read_stream(router)
        assert (text, ids, errors) == (ANSWER, script, [])
        await until(lambda: prefill.cancels)


async def test_a_worker_that_gives_no_first_token_in_time_is_left(model: Path) -> None:
    script = tiny_script(model)
    workers = [FakeWorker(f"a{i}", AGGREGATED, script) for i in (1, 2)]
    workers[0].pause_at = 0
    times = DispatchTimes(first_token_s=3.0)
    async with running_router(model, workers, dispatch_times=times) as router:
        while not workers[0].submits:
            text, ids, errors = await read_stream(router)
            assert (text, ids, errors) == (ANSWER, script, [])
        for submit in workers[0].submits:
            wanted = (submit.ticket.request_id, submit.ticket.epoch)
            await until(lambda wanted=wanted: wanted in workers[0].cancels)
        assert workers[0].running == set()


async def test_a_broken_stream_is_resumed_and_nothing_is_computed_twice(model: Path) -> None:
    script = tiny_script(model)
    worker = FakeWorker("a1", AGGREGATED, script)
    worker.pause_at = 5
    async with running_router(model, [worker]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(worker._frames) == 5)
        await worker.break_streams()
        worker.resume.set()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])
        assert len(worker.submits) == 1


async def test_a_cancel_that_went_into_a_stream_that_broke_is_said_again(model: Path) -> None:
    """Else the worker would compute for nobody, and hold its blocks meanwhile."""
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    worker.pause_at = 0
    async with running_router(model, [worker]) as router:
        asking = asyncio.create_task(
            router.session.post(f"{router.url}{PATH}", json=BODY).__aenter__()
        )
        await until(lambda: worker.running)
        worker.deaf = True
        asking.cancel()
        await until(lambda: _is_idle(router))
        await asyncio.sleep(0.1)  # it is on its way by now; if it is not, nothing is lost
        assert worker.running
        worker.deaf = False
        await worker.break_streams()
        await until(lambda: worker.cancels)
        await until(lambda: not worker.running)


async def test_a_worker_that_restarts_gets_its_requests_again(model: Path) -> None:
    script = tiny_script(model)
    worker = FakeWorker("a1", AGGREGATED, script)
    worker.pause_at = 5
    async with running_router(model, [worker]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(worker._frames) == 5)
        worker.pause_at = None
        await worker.restart()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])
        sent = list(worker.submits[1].output_token_ids)
        assert sent == script[: len(sent)]


async def test_frames_of_a_past_epoch_and_repeated_positions_are_dropped(model: Path) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    decode.pause_at = 3
    async with running_router(model, [prefill, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(decode._frames) == 2)
        (first,), (second,) = prefill.submits, decode.submits
        await prefill.say(first, 3, [7, 7, 7])  # its part is over
        await decode.say(second, 3, [7], epoch=1)  # another attempt
        await decode.say(second, 0, script[:3])  # all seen
        await decode.say(second, 2, script[2:4])  # half seen
        decode.pause_at = None
        decode.resume.set()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, script, [])


async def test_a_client_that_leaves_frees_what_it_had_everywhere(model: Path) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    decode.pause_at = 4
    async with running_router(model, [prefill, decode]) as router:
        for stream in (True, False):
            decode.cancels.clear()
            body = {**BODY, "stream": stream}
            asking = asyncio.create_task(
                router.session.post(f"{router.url}{PATH}", json=body).__aenter__()
            )
            await until(lambda: decode.running)
            if stream:
                (await asking).close()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            submit = decode.submits[-1].ticket
            await until(lambda submit=submit: decode.cancels == [(submit.request_id, submit.epoch)])
            await until(lambda: not decode.running)
        await until(lambda: _is_idle(router))


async def test_a_client_that_leaves_before_token_1_cancels_prefill(model: Path) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    prefill.pause_at = 0
    async with running_router(model, [prefill, decode]) as router:
        asking = asyncio.create_task(
            router.session.post(f"{router.url}{PATH}", json=BODY).__aenter__()
        )
        await until(lambda: prefill.running)
        asking.cancel()
        await until(lambda: prefill.cancels)
        await until(lambda: not prefill.running)
        assert decode.submits == []


async def test_a_client_that_reads_nothing_is_left(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "WRITE_TIMEOUT_S", 0.3)
    worker = FakeWorker("a1", AGGREGATED, [5] * 1000)
    async with running_router(model, [worker]) as router:
        client = socket.socket()
        # small segments and a small window: little fits between the two
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 500)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = router.url.removeprefix("http://").split(":")
        with client:
            client.connect((host, int(port)))
            body = b'{"prompt": "x", "max_tokens": 1000, "stream": true, "logprobs": 20}'
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            await until(lambda: len(worker.submits) == 1)
            await until(lambda: _is_idle(router))
            await until(lambda: not worker.running)


async def _is_idle(router: Running) -> bool:
    return await router.metric('vllm:num_requests_running{model_name="tiny"}') == 0


async def test_a_full_queue_sends_the_request_elsewhere_then_back(model: Path) -> None:
    script = tiny_script(model)
    workers = [FakeWorker(f"a{i}", AGGREGATED, script) for i in (1, 2)]
    async with running_router(model, workers) as router:
        workers[0].refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(4):
            assert (await read_stream(router))[0] == ANSWER
        workers[1].refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
        status, body, headers = await router.post(PATH, {**BODY, "stream": False})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["code"] == "over_capacity"


async def test_what_a_worker_refuses_for_good_is_the_clients_error(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    worker.refuse = grpc.StatusCode.INVALID_ARGUMENT
    async with running_router(model, [worker]) as router:
        status, body, _ = await router.post(PATH, BODY)
        assert status == 400
        assert body["error"]["message"] == "refused by the script"
        assert len(worker.submits) == 1


async def test_a_request_that_fails_everywhere_ends_in_an_error_event(model: Path) -> None:
    script = tiny_script(model)
    worker = FakeWorker("a1", AGGREGATED, script)
    worker.pause_at = 2
    times = DispatchTimes(recovery_s=0.2)
    async with running_router(model, [worker], dispatch_times=times) as router:
        heard: list[int] = []
        reading = asyncio.create_task(read_stream(router, heard=heard))
        await until(lambda: len(heard) == 2)
        await worker.die()
        _, ids, errors = await reading
        assert ids == script[:2]
        assert [error["code"] for error in errors] == ["unavailable"]


async def test_the_deadline_ends_a_request_before_its_first_byte_with_504(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    worker.pause_at = 0
    async with running_router(model, [worker], request_timeout_s=0.3) as router:
        status, body, _ = await router.post(PATH, BODY)
        assert status == 504
        assert body["error"]["type"] == "timeout_error"
        await until(lambda: not worker.running)


async def test_load_spreads_over_equal_workers(model: Path) -> None:
    script = tiny_script(model)
    workers = [FakeWorker(f"a{i}", AGGREGATED, script) for i in (1, 2, 3)]
    for worker in workers:
        worker.pause_at = 1
    async with running_router(model, workers) as router:
        asking = [asyncio.create_task(read_stream(router)) for _ in range(9)]
        await until(lambda: sum(len(w.submits) for w in workers) == 9)
        assert [len(w.submits) for w in workers] == [3, 3, 3]
        for worker in workers:
            worker.resume.set()
        assert [text for text, _, _ in await asyncio.gather(*asking)] == [ANSWER] * 9


@pytest.mark.parametrize("drain_s", [60.0, 0.0])
async def test_a_router_that_stops_lets_streams_end_for_as_long_as_it_may(
    model: Path, drain_s: float
) -> None:
    script = tiny_script(model)
    prefill, decode = FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)
    decode.pause_at = 6
    async with aiohttp.ClientSession() as session:
        async with running_router(model, [prefill, decode], drain_s=drain_s) as router:
            client = dataclasses.replace(router, session=session)
            reading = asyncio.create_task(read_stream(client))
            await until(lambda: decode.submits)
            if drain_s:
                asyncio.get_running_loop().call_later(0.2, decode.resume.set)
        text, ids, errors = await reading
        if drain_s:
            assert (text, ids, errors) == (ANSWER, script, [])
        else:
            assert ANSWER.startswith(text)
            assert [error["code"] for error in errors] == ["draining"]


async def test_a_worker_with_little_room_gets_only_what_fits_and_lowers_no_limit(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tiny_script(model)
    prefill = FakeWorker("p1", PREFILL, script)
    none, roomy = (FakeWorker(f"d{i}", DECODE, script) for i in (1, 2))
    alone = FakeWorker("a1", AGGREGATED, script)
    none.max_model_len, alone.max_model_len = 1, 40
    async with running_router(model, [prefill, none, roomy, alone]) as router:
        for _ in range(4):
            assert await read_stream(router) == (ANSWER, script, [])
        too_long = {**BODY, "max_tokens": 1024, "stream": False}
        status, answer, _ = await router.post(PATH, too_long)
        assert (status, "maximum context length is 1024" in str(answer)) == (400, True)
    assert (len(roomy.submits), none.submits, alone.submits) == (4, [], [])
    assert f"{none.address} 1" in caplog.text, "workers that do not agree are named"


async def test_a_worker_that_promises_more_room_than_the_model_has_raises_no_limit(
    model: Path,
) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    worker.max_model_len = 1 << 30
    async with running_router(model, [worker]) as router:
        assert '"max_model_len":1024' in (await router.get("/v1/models"))[1]


async def test_what_a_worker_invents_reaches_nobody(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tiny_script(model)
    evil = FakeWorker("d1", DECODE, [*script[:3], 1 << 31, *script[4:]])
    workers = [FakeWorker("p1", PREFILL, script), evil, FakeWorker("d2", DECODE, script)]
    async with running_router(model, workers) as router:
        while not evil.submits:
            assert await read_stream(router) == (ANSWER, script, [])
    assert "d1/d1-1 gave a token outside the vocabulary" in caplog.text
