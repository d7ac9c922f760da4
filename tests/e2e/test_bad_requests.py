"""Two hundred bad requests to real services: each is refused by name, and nothing of them stays."""

from __future__ import annotations

import http.client
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.launcher.child import free_ports
from diptych.proto import inference_pb2, inference_pb2_grpc
from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "Hello"},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
}
BAD_FIELDS: list[dict[str, Any]] = [
    *({"max_tokens": value} for value in (0, -1, 1.5, "4", True, [], 10**6, 10**30)),
    *({"temperature": value} for value in (-1, 3, "hot", [1])),
    *({"top_p": value} for value in (0, 2, "x")),
    *({"n": value} for value in (0, 2, -1, "1")),
    *({"seed": value} for value in (2**64, "x", 1.5)),
    *({"stop": value} for value in ([""], 5, [5])),
    *({"stop_token_ids": value} for value in ([-1], [10**9], ["a"], [2**70])),
    *({"logit_bias": value} for value in ({"-1": 1}, {"99999": 1}, {"5": "x"})),
    *({"model": value} for value in ("other", 5, ["tiny"])),
    {"min_tokens": 5, "max_tokens": 4},
    {"allowed_token_ids": []},
    {"bad_words": [""]},
    {"cache_salt": ""},
    {"tools": [{}]},
    {"stream_options": 5, "stream": True},
]
BAD_PROMPTS: list[tuple[str, dict[str, Any]]] = [
    *((TEXT, {"prompt": value}) for value in ("", [], [[]], 5, [5.5], [-1], [10**9], [2**70])),
    *((TEXT, {"prompt": value}) for value in (["a", ""], [3] * 5000, "x" * 100_000)),
    *((CHAT, {"messages": value}) for value in ([], "x", [5], [{}], [{"role": "user"}])),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}),
]
BAD_BODIES = [
    b"",
    b"hello",
    b"[1]",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "x", "temperature": NaN}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
]


def bad_requests() -> Iterator[tuple[str, bytes]]:
    for path, fields, stream in itertools.product(PROMPTS, BAD_FIELDS, (False, True)):
        yield path, _body({**PROMPTS[path], "stream": stream, **fields})
    for (path, prompt), stream in itertools.product(BAD_PROMPTS, (False, True)):
        yield path, _body({**prompt, "stream": stream})
    for path, body in itertools.product(PROMPTS, BAD_BODIES):
        yield path, body


def bad_messages() -> Iterator[inference_pb2.GenerateRequest]:
    sampling: list[dict[str, Any]] = [
        {"max_tokens": 0},
        {"max_tokens": 2**32 - 1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"n": 2},
        {"stop": [""]},
        {"stop_token_ids": [2**31]},
        {"allowed_token_ids": [2**31]},
        {"logprobs": 100},
    ]
    for fields in sampling:
        request = inference_pb2.GenerateRequest(model="tiny", text="Hello")
        request.sampling.MergeFrom(type(request.sampling)(**fields))
        yield request
    for prompt in ({}, {"text": ""}, {"tokens": {}}, {"tokens": {"token_ids": [2**31]}}):
        yield inference_pb2.GenerateRequest(model="tiny", **prompt)
    yield inference_pb2.GenerateRequest(model="tiny", chat={})
    yield inference_pb2.GenerateRequest(model="tiny", tokens={"token_ids": [3] * 5000})
    yield inference_pb2.GenerateRequest(model="other", text="Hello")


def test_bad_requests_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    grpc_port = free_ports(1)[0]
    with cluster(make_tiny_model(tmp_path / "model"), tmp_path) as made:
        _, store = made.kvstore()
        prefill, first = made.worker("prefill", store=store)
        decode, second = made.worker("decode", store=store)
        router, api = made.router(first, second, grpc_port=grpc_port)
        made.wait_ready()
        until(lambda: router.metric("diptych:workers_ready") == 2, "both workers are connected")
        expected = _answer(api)
        _refuse_all(api.port, grpc_port)  # once first: pools of threads and channels are filled
        before = {service.command: _held(service) for service in made.services}

        assert _refuse_all(api.port, grpc_port) >= 200

        for service in made.services:
            held = before[service.command]
            until(lambda s=service, h=held: not _more(_held(s), h), f"{service.command}: {held}")
            assert "Traceback" not in service.log.read_text()
        for worker in (prefill, decode):
            until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks")
        assert router.metric("vllm:num_requests_running") == 0
        assert _answer(api) == expected


def _answer(api: Api) -> str:
    fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return str(api.complete([5, 6, 7] * 40, **fields)["choices"][0]["text"])


def _refuse_all(port: int, grpc_port: int) -> int:
    """Send every bad request; how many there were."""
    number = 0
    for path, body in bad_requests():
        number += 1
        status, answer = _post(port, path, body)
        assert status in (400, 404, 413), (body[:200], status, answer)
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for request in bad_messages():
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request, timeout=150))
            assert caught.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.UNIMPLEMENTED,
            )
            number += 1
    return number


def _post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=150)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _held(service: ServiceProcess) -> tuple[int, int]:
    """Open files and threads of a process."""
    assert service.process is not None
    directory = f"/proc/{service.process.pid}"
    return len(os.listdir(f"{directory}/fd")), len(os.listdir(f"{directory}/task"))


def _more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return now[0] > before[0] or now[1] > before[1]


def _body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
