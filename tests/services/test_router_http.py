"""The router over real HTTP, in front of workers that speak worker.proto."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.fake_worker import AGGREGATED, DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("router"))


def split_workers(model: Path, text: str = ANSWER) -> list[FakeWorker]:
    script = tiny_script(model, text)
    return [FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)]


async def test_the_official_client_gets_the_answer(model: Path) -> None:
    prefill, decode = split_workers(model)
    async with (
        running_router(model, [prefill, decode]) as router,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=64
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.id.startswith("chatcmpl-")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(prefill.script)
        assert answer.usage.prompt_tokens == len(prefill.submits[0].prompt_token_ids)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3

        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == ANSWER
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(prefill.script)
        entries = [
            entry
            for c in chunks
            if c.choices and c.choices[0].logprobs
            for entry in c.choices[0].logprobs.content or []
        ]
        assert len(entries) == len(prefill.script)
        assert all(e.logprob == -0.5 and len(e.top_logprobs) == 2 for e in entries)
        assert entries[0].top_logprobs[0].token == entries[0].token

        completion = await client.completions.create(
            model="tiny", prompt="The capital", max_tokens=5, logprobs=1
        )
        choice = completion.choices[0]
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text == ANSWER[: len(choice.text)]
        assert choice.logprobs.token_logprobs == [-0.5] * 5
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0
        assert [m.id async for m in await client.models.list()] == ["tiny"]


async def test_a_split_request_is_prefilled_once_and_decoded_on_the_hand_off(model: Path) -> None:
    prefill, decode = split_workers(model)
    async with running_router(model, [prefill, decode]) as router:
        await router.post("/v1/completions", {"prompt": "Hello", "max_tokens": 64, "seed": 7})
        (first,), (second,) = prefill.submits, decode.submits
        assert first.handoff_out
        assert not first.output_token_ids
        assert not second.handoff_out
        assert list(second.output_token_ids) == prefill.script[:1]
        assert second.handoff_in.num_tokens == len(first.prompt_token_ids)
        assert (first.ticket.epoch, second.ticket.epoch) == (1, 2)
        assert first.sampling.seed == second.sampling.seed == 7
        assert first.sampling.max_tokens == second.sampling.max_tokens == 64
        assert prefill.cancels == decode.cancels == []


async def test_token_1_that_ends_the_request_needs_no_decode_worker(model: Path) -> None:
    prefill, decode = split_workers(model)
    async with running_router(model, [prefill, decode]) as router:
        status, body, _ = await router.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 1
        assert decode.submits == []


async def test_a_stop_string_cuts_the_text_and_ends_the_work(model: Path) -> None:
    prefill, decode = split_workers(model)
    async with running_router(model, [prefill, decode]) as router:
        decode.pause_at = len(decode.script) - 3
        status, body, _ = await router.post(
            "/v1/completions", {"prompt": "Hello", "max_tokens": 64, "stop": [" Paris"]}
        )
        assert status == 200
        choice = body["choices"][0]
        assert choice["text"] == ANSWER[: ANSWER.index(" Paris")]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " Paris")
        assert body["usage"]["completion_tokens"] < len(decode.script)


async def test_a_stop_string_in_token_1_cancels_the_hand_off(model: Path) -> None:
    prefill, decode = split_workers(model)
    prefill.commits = False
    async with running_router(model, [prefill, decode]) as router:
        body = {"prompt": "Hello", "max_tokens": 64, "stop": ANSWER[0]}
        status, answer, _ = await router.post("/v1/completions", body)
        assert status == 200
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == 1
        assert decode.submits == []
        await until(lambda: prefill.cancels)


async def test_several_prompts_give_several_choices(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        for prompt in (["one", "two"], [[1, 2, 3], [4, 5]]):
            status, body, _ = await router.post(
                "/v1/completions", {"prompt": prompt, "max_tokens": 40, "return_token_ids": True}
            )
            assert status == 200
            assert [c["index"] for c in body["choices"]] == [0, 1]
            assert [c["text"] for c in body["choices"]] == [ANSWER] * 2
            assert [c["token_ids"] for c in body["choices"]] == [worker.script] * 2
            assert body["usage"]["completion_tokens"] == 2 * len(worker.script)
        assert body["choices"][0]["prompt_token_ids"] == [1, 2, 3]
        assert len(worker.submits) == 4


async def test_a_stream_of_several_prompts_carries_each_choice_whole(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        body = {"prompt": ["one", "two"], "max_tokens": 40, "stream": True}
        texts = {0: "", 1: ""}
        for event in await _events(router, "/v1/completions", body):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: ANSWER, 1: ANSWER}


async def test_every_chunk_carries_usage_where_asked(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        body = {
            "prompt": "one",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        events = await _events(router, "/v1/completions", body)
        assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4, 4]


async def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        body = {"prompt": "Hello you", "max_tokens": 3, "echo": True, "logprobs": 1}
        _, answer, _ = await router.post("/v1/completions", body)
        (choice,) = answer["choices"]
        num_prompt = answer["usage"]["prompt_tokens"]
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert choice["text"].startswith("Hello youThe")
        assert logprobs["token_logprobs"] == [None] + [-0.5] * (num_prompt + 2)
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"][num_prompt] == len("Hello you")
        streamed = await _events(router, "/v1/completions", {**body, "stream": True})
        choices = [event["choices"][0] for event in streamed]
        assert "".join(c["text"] for c in choices) == choice["text"]
        offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
        assert offsets == logprobs["text_offset"]


async def test_request_ids_are_echoed_and_made(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        body = {"prompt": "one", "max_tokens": 2}
        _, answer, headers = await router.post(
            "/v1/completions", body, headers={"X-Request-Id": "mine-7"}
        )
        assert headers["X-Request-Id"] == "mine-7"
        assert answer["id"] == "cmpl-mine-7"
        _, _, headers = await router.post("/v1/completions", body)
        assert len(headers["X-Request-Id"]) == 32
        assert "mine-7" not in worker.submits[0].ticket.request_id


async def test_readiness_names_what_is_missing(model: Path) -> None:
    prefill, _ = split_workers(model)
    async with running_router(model, [prefill]) as router:
        assert (await router.get("/livez"))[0] == 200
        status, text = await router.get("/readyz")
        assert status == 503
        assert "no decode worker is ready" in text
        # all the same, a request is served by the worker there is
        status, body, _ = await router.post("/v1/completions", {"prompt": "x", "max_tokens": 40})
        assert (status, body["choices"][0]["text"]) == (200, ANSWER)
        assert not prefill.submits[0].handoff_out


async def test_keys_are_checked_and_read_again(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# users\nalice:secret-1\n")
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker], api_keys=str(keys)) as router:
        body = {"prompt": "one", "max_tokens": 2}
        for header in (None, "Bearer wrong", "Basic secret-1", "Bearer "):
            headers = {"Authorization": header} if header else {}
            status, error, _ = await router.post("/v1/completions", body, headers=headers)
            assert status == 401
            assert error["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret-1"}
        # a client cannot say who it is but by its key
        named = {**body, "tenant": "bob"}
        assert (await router.post("/v1/completions", named, headers=good))[0] in (200, 400)
        assert (await router.post("/v1/completions", body, headers=good))[0] == 200
        assert {submit.tenant for submit in worker.submits} == {"alice"}
        assert (await router.get("/readyz"))[0] == 200


async def test_too_many_requests_are_told_when_to_come_back(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker], max_in_flight=1) as router:
        status, body, headers = await router.post(
            "/v1/completions", {"prompt": ["one", "two"], "max_tokens": 2}
        )
        assert status == 429
        assert headers["Retry-After"] == "1"
        assert body["error"]["type"] == "rate_limit_error"
        status, _, _ = await router.post("/v1/completions", {"prompt": "one", "max_tokens": 2})
        assert status == 200


async def test_without_workers_requests_get_503(model: Path) -> None:
    async with running_router(model, [], wait_ready=False) as router:
        status, body, headers = await router.post("/v1/completions", {"prompt": "x"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "unavailable"


async def test_metrics_count_what_was_served(model: Path) -> None:
    prefill, decode = split_workers(model)
    async with running_router(model, [prefill, decode]) as router:
        await router.post("/v1/completions", {"prompt": "one", "max_tokens": 40})
        label = '{model_name="tiny"}'
        assert await router.metric(f"vllm:generation_tokens_total{label}") == len(prefill.script)
        assert await router.metric(f"vllm:time_to_first_token_seconds_count{label}") == 1
        assert await router.metric(f"vllm:e2e_request_latency_seconds_count{label}") == 1
        stopped = 'vllm:request_success_total{finished_reason="stop",model_name="tiny"}'
        assert await router.metric(stopped) == 1
        assert await router.metric(f"vllm:num_requests_running{label}") == 0
        await router.post("/v1/completions", {"prompt": ""})
        assert await router.metric('diptych:http_responses_total{status="200"}') == 1
        assert await router.metric('diptych:http_responses_total{status="400"}') == 1


async def _events(router: Any, path: str, body: Any) -> list[Any]:
    """The events of a stream; it must end with [DONE]."""
    async with router.session.post(f"{router.url}{path}", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    lines = [line[len("data: ") :] for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_connection_without_a_whole_header_is_not_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.services.router.main.IDLE_S", 0.3)
    async with running_router(model, [], wait_ready=False) as router:
        host, _, port = router.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
