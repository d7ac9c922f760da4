"""What a client may get wrong: the right status, an OpenAI error body, nothing leaked, no crash."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.services.router import gateway
from diptych.services.router.completion_form import CompletionForm
from tests.services.fake_worker import AGGREGATED, FakeWorker
from tests.services.router_fixture import Running, running_router, tiny_directory, tiny_script

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": HELLO, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4, **fields}).encode()


# (name, path, body, status, what the message or param must contain)
BAD: list[tuple[str, str, bytes, int, str]] = [
    ("malformed JSON", TEXT, b'{"model": "tiny", ', 400, "JSON"),
    ("no JSON", CHAT, b"hello", 400, "JSON"),
    ("empty body", CHAT, b"", 400, "JSON"),
    ("a list", CHAT, b"[1]", 400, "object"),
    ("nested without end", CHAT, b"[" * 100_000, 400, "JSON"),
    ("invalid UTF-8", TEXT, b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, "JSON"),
    ("a lone surrogate", TEXT, b'{"model": "tiny", "prompt": "\\ud800"}', 400, "JSON"),
    ("a NaN", TEXT, text(temperature=float("nan")), 400, "JSON"),
    ("an infinity", TEXT, text(temperature=float("inf")), 400, "JSON"),
    ("a number too large", TEXT, b'{"prompt": "x", "temperature": 1e999}', 400, "JSON"),
    ("10 MB body", TEXT, text(prompt="x" * 10_000_000), 413, "too large"),
    ("unknown model", CHAT, chat(model="gpt-4"), 404, "gpt-4"),
    ("model of wrong type", CHAT, chat(model=5), 400, "model"),
    ("no prompt", TEXT, b'{"model": "tiny"}', 400, "prompt"),
    ("empty prompt", TEXT, text(prompt=""), 400, "prompt"),
    ("empty prompt list", TEXT, text(prompt=[]), 400, "prompt"),
    ("empty prompt in a list", TEXT, text(prompt=["a", ""]), 400, "prompt"),
    ("empty token list", TEXT, text(prompt=[[]]), 400, "prompt"),
    ("prompt of wrong type", TEXT, text(prompt={"a": 1}), 400, "prompt"),
    ("prompt of mixed types", TEXT, text(prompt=[1, "a"]), 400, "prompt"),
    ("prompt of floats", TEXT, text(prompt=[1.5]), 400, "prompt"),
    ("too many prompts", TEXT, text(prompt=["a"] * 300), 400, "prompt"),
    ("id out of vocabulary", TEXT, text(prompt=[1, 99999]), 400, "99999"),
    ("negative id", TEXT, text(prompt=[-1]), 400, "-1"),
    ("huge id", TEXT, text(prompt=[2**70]), 400, "vocabulary"),
    ("prompt too long", TEXT, text(prompt=[1] * 2000), 400, "maximum context length"),
    (
        "chat too long",
        CHAT,
        chat(messages=[{"role": "user", "content": "a1 " * 2000}]),
        400,
        "1024",
    ),
    ("no messages", CHAT, b'{"model": "tiny"}', 400, "messages"),
    ("empty messages", CHAT, chat(messages=[]), 400, "messages"),
    ("messages of wrong type", CHAT, chat(messages="hi"), 400, "messages"),
    ("message of wrong type", CHAT, chat(messages=["hi"]), 400, "messages[0]"),
    ("message without role", CHAT, chat(messages=[{"content": "x"}]), 400, "role"),
    ("message without content", CHAT, chat(messages=[{"role": "user"}]), 400, "content"),
    (
        "content of wrong type",
        CHAT,
        chat(messages=[{"role": "user", "content": 5}]),
        400,
        "content",
    ),
    (
        "an image",
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "text parts",
    ),
    ("max_tokens 0", TEXT, text(max_tokens=0), 400, "max_tokens"),
    ("max_tokens negative", TEXT, text(max_tokens=-1), 400, "max_tokens"),
    ("max_tokens absurd", TEXT, text(max_tokens=100_000_000), 400, "maximum context length"),
    ("max_tokens beyond all", TEXT, text(max_tokens=10**30), 400, "max_tokens"),
    ("max_tokens of wrong type", TEXT, text(max_tokens="4"), 400, "max_tokens"),
    ("max_tokens of true", TEXT, text(max_tokens=True), 400, "max_tokens"),
    ("max_completion_tokens 0", CHAT, chat(max_completion_tokens=0), 400, "max_tokens"),
    ("temperature negative", TEXT, text(temperature=-0.1), 400, "temperature"),
    ("temperature of wrong type", TEXT, text(temperature="hot"), 400, "temperature"),
    ("temperature too large", TEXT, text(temperature=2.5), 400, "temperature"),
    ("temperature beyond floats", TEXT, text(temperature=10**400), 400, "temperature"),
    ("top_p 0", TEXT, text(top_p=0), 400, "top_p"),
    ("top_k below -1", TEXT, text(top_k=-2), 400, "top_k"),
    ("min_p 2", TEXT, text(min_p=2), 400, "min_p"),
    ("repetition_penalty 0", TEXT, text(repetition_penalty=0), 400, "repetition_penalty"),
    ("presence_penalty 3", TEXT, text(presence_penalty=3), 400, "presence_penalty"),
    ("min_tokens over max_tokens", TEXT, text(min_tokens=5), 400, "min_tokens"),
    ("seed of wrong type", TEXT, text(seed="x"), 400, "seed"),
    ("seed too large", TEXT, text(seed=2**64), 400, "seed"),
    ("stop of wrong type", TEXT, text(stop=5), 400, "stop"),
    ("stop of wrong items", TEXT, text(stop=["a", 5]), 400, "stop"),
    ("empty stop", TEXT, text(stop=""), 400, "stop"),
    ("stop id out of vocabulary", TEXT, text(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    ("stop ids of wrong type", TEXT, text(stop_token_ids=["a"]), 400, "stop_token_ids"),
    ("logit_bias of wrong type", TEXT, text(logit_bias=[1]), 400, "logit_bias"),
    ("logit_bias of words", TEXT, text(logit_bias={"the": 1}), 400, "logit_bias"),
    ("logit_bias out of vocabulary", TEXT, text(logit_bias={"999999": 1}), 400, "logit_bias"),
    ("allowed_token_ids empty", TEXT, text(allowed_token_ids=[]), 400, "allowed_token_ids"),
    ("bad_words empty", TEXT, text(bad_words=[""]), 400, "bad_words"),
    ("too many logprobs", TEXT, text(logprobs=21), 400, "logprobs"),
    ("logprobs of a chat as a count", CHAT, chat(logprobs=3), 400, "logprobs"),
    ("top_logprobs without logprobs", CHAT, chat(top_logprobs=3), 400, "top_logprobs"),
    ("too many top_logprobs", CHAT, chat(logprobs=True, top_logprobs=21), 400, "logprobs"),
    ("prompt_logprobs in a stream", TEXT, text(prompt_logprobs=1, stream=True), 400, "stream"),
    ("stream of wrong type", TEXT, text(stream="yes"), 400, "stream"),
    (
        "stream_options without stream",
        CHAT,
        chat(stream_options={"include_usage": True}),
        400,
        "stream_options",
    ),
    (
        "include_usage of wrong type",
        CHAT,
        chat(stream=True, stream_options={"include_usage": 1}),
        400,
        "include_usage",
    ),
    ("cache_salt empty", TEXT, text(cache_salt=""), 400, "cache_salt"),
    ("cache_salt too long", TEXT, text(cache_salt="x" * 1025), 400, "cache_salt"),
    ("priority of wrong type", TEXT, text(priority="high"), 400, "priority"),
    ("n 0", TEXT, text(n=0), 400, "n must"),
    # what a later version brings is refused by name
    ("n 2", CHAT, chat(n=2), 400, "n must be 1 in this version"),
    ("best_of", TEXT, text(best_of=2), 400, "best_of is not supported"),
    ("beam search", TEXT, text(use_beam_search=True), 400, "use_beam_search is not supported"),
    ("echo of a chat", CHAT, chat(echo=True), 400, "echo is not supported"),
    ("suffix", TEXT, text(suffix="x"), 400, "suffix is not supported"),
    ("tools", CHAT, chat(tools=[{"type": "function"}]), 400, "tools is not supported"),
    ("json_object", CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    ("guided_json", CHAT, chat(guided_json={}), 400, "guided_json is not supported"),
    ("structured_outputs", CHAT, chat(structured_outputs={"json": {}}), 400, "structured_outputs"),
    ("logits_processors", TEXT, text(logits_processors=["a"]), 400, "logits_processors"),
    ("template variable self", CHAT, chat(chat_template_kwargs={"self": 1}), 400, "must not have"),
    ("template variables", CHAT, chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    ("a template of the client", CHAT, chat(chat_template="{{1}}"), 400, "chat_template is not"),
]


@pytest.fixture(scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    model = tiny_directory(tmp_path_factory.mktemp("bad"))
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as running:
        yield running
        # whatever was asked of it, it still serves
        assert (await running.post(TEXT, {"prompt": "Hello", "max_tokens": 2}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [case[1:] for case in BAD],
    ids=[case[0].replace(" ", "-") for case in BAD],
)
async def test_bad_input_gets_a_clear_error(
    router: Running, path: str, body: bytes, status: int, expected: str
) -> None:
    async with router.session.post(f"{router.url}{path}", data=io.BytesIO(body)) as response:
        raw = await response.read()
        assert response.status == status, raw
        assert response.content_type == "application/json"
        assert response.headers["X-Request-Id"]
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert expected in error["message"] or expected == error["param"], error
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in raw.decode()
    assert len(raw) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"no_such_field": {"a": 1}, "user": "me", "metadata": {}, "store": False},
        {"n": 1, "best_of": 1, "suffix": None, "echo": False, "logit_bias": None, "stop": None},
        {"temperature": None, "top_p": None, "seed": None, "stream": None, "logprobs": None},
        {"max_tokens": 4.0, "top_k": -1, "seed": -1, "response_format": {"type": "text"}},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"model": None},
    ],
)
async def test_unknown_and_neutral_fields_are_ignored(
    router: Running, fields: dict[str, Any]
) -> None:
    status, body, _ = await router.post(TEXT, {"prompt": "Hello", "max_tokens": 4, **fields})
    assert status == 200, body
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_paths_and_methods_have_errors_in_the_same_form(
    router: Running, method: str, path: str, status: int, code: str
) -> None:
    async with router.session.request(method, f"{router.url}{path}") as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code


async def test_a_request_id_that_cannot_be_echoed_is_refused(router: Running) -> None:
    status, body, headers = await router.post(
        TEXT, {"prompt": "Hello"}, headers={"X-Request-Id": "x" * 300}
    )
    assert status == 400
    assert body["error"]["param"] == "X-Request-Id"
    assert headers["X-Request-Id"] != "x" * 300


@pytest.mark.parametrize(
    ("headers", "body", "status", "expected"),
    [
        ({"Content-Encoding": "gzip"}, text(), 400, "not encoded as its headers say"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 50_000_000), 413, "too large"),
        ({"Content-Length": "99999999999"}, b"", 413, "too large"),
        ({"Content-Length": "10"}, b"{", 408, "no whole body came"),
    ],
    ids=["not gzip", "a bomb", "too long by its word", "never whole"],
)
@pytest.mark.parametrize("limit", ["BODY_TIMEOUT_S", "BODY_STALL_S"])
async def test_a_body_that_cannot_be_read_is_refused(
    router: Running,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    expected: str,
) -> None:
    monkeypatch.setattr(gateway, limit, 0.2)
    host, port = router.url.removeprefix("http://").split(":")
    lines = {"Host": host, "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {TEXT} HTTP/1.1\r\n{head}\r\n".encode() + body)
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"}}")
    writer.close()

    assert int(answer.split()[1]) == status
    assert expected in json.loads(answer[answer.index(b'{"error"') :])["error"]["message"]


async def test_an_unforeseen_error_in_a_stream_is_an_event_and_quotes_nothing(
    router: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = CompletionForm.chunk

    def fails_at_the_second(form: CompletionForm, index: int, state: Any, delta: Any) -> Any:
        if len(state.token_ids) > len(delta.token_ids):
            raise KeyError(state.request.prompt)
        return chunk(form, index, state, delta)

    monkeypatch.setattr(CompletionForm, "chunk", fails_at_the_second)
    async with router.session.post(f"{router.url}{TEXT}", data=text(stream=True)) as response:
        lines = [line async for line in response.content if line.strip()]

    assert response.status == 200
    assert json.loads(lines[-2].removeprefix(b"data: "))["error"]["type"] == "internal_error"
    assert lines[-1] == b"data: [DONE]\n"
    assert "KeyError" in caplog.text
    assert "Hello" not in caplog.text
