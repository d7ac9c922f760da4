"""The gRPC front answers as the HTTP one does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.proto import common_pb2, inference_pb2, inference_pb2_grpc
from diptych.services.router import front
from tests.services.fake_worker import AGGREGATED, DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("grpc"))


def ask(**fields: Any) -> inference_pb2.GenerateRequest:
    fields = {"model": "tiny", "text": "Hello"} | fields
    return inference_pb2.GenerateRequest(**fields)


async def test_generate_equals_the_http_answer_in_every_field(model: Path) -> None:
    script = tiny_script(model)
    workers = [FakeWorker("p1", PREFILL, script), FakeWorker("d1", DECODE, script)]
    async with (
        running_router(model, workers) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        _, body, _ = await router.post(
            "/v1/completions",
            {
                "prompt": "Hello",
                "max_tokens": 60,
                "logprobs": 2,
                "return_token_ids": True,
                "stop": " they",
                "seed": 5,
                "priority": -3,
                "cache_salt": "mine",
                "logit_bias": {"7": 1.5},
            },
        )
        request = ask(
            sampling=common_pb2.SamplingParams(
                max_tokens=60, logprobs=2, stop=[" they"], seed=5, logit_bias={7: 1.5}
            ),
            return_token_ids=True,
            priority=-3,
            cache_salt="mine",
        )
        call = stub.Generate(request, metadata=[("x-request-id", "mine-1")])
        pieces = [piece async for piece in call]
        assert dict(await call.initial_metadata())["x-request-id"] == "mine-1"
        last = pieces[-1]
        (choice,) = body["choices"]
        assert {p.request_id for p in pieces} == {"mine-1"}
        assert {p.model for p in pieces} == {"tiny"}
        assert last.created_unix_s >= body["created"]
        assert "".join(p.text for p in pieces) == choice["text"] == ANSWER[: ANSWER.index(" they")]
        assert [i for p in pieces for i in p.token_ids] == choice["token_ids"]
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert choice["finish_reason"] == "stop"
        assert last.stop_reason == choice["stop_reason"] == " they"
        usage = body["usage"]
        assert last.usage.prompt_tokens == usage["prompt_tokens"]
        assert last.usage.completion_tokens == usage["completion_tokens"]
        assert last.usage.total_tokens == usage["total_tokens"]
        assert last.usage.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"] == 3
        tokens = [entry for p in pieces for entry in p.logprobs]
        assert [t.token for t in tokens] == choice["logprobs"]["tokens"]
        assert [t.logprob for t in tokens] == choice["logprobs"]["token_logprobs"]
        assert [{top.token: top.logprob for top in t.top_logprobs} for t in tokens] == choice[
            "logprobs"
        ]["top_logprobs"]
        # and the workers were asked the same
        for worker in workers:
            http, rpc = worker.submits
            for submit in (http, rpc):
                submit.ClearField("ticket")
                submit.handoff_in.epoch = 0
            assert http == rpc


async def test_tokens_and_chat_prompts_reach_the_worker(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with (
        running_router(model, [worker]) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        tokens = common_pb2.TokenSequence(token_ids=[1, 2, 3])
        pieces = [p async for p in stub.Generate(ask(text=None, tokens=tokens))]
        assert list(worker.submits[0].prompt_token_ids) == [1, 2, 3]
        assert pieces[-1].usage.completion_tokens == 16  # the default of completions
        chat = inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content="Hello")]
        )
        [p async for p in stub.Generate(ask(text=None, chat=chat))]
        await router.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
        )
        grpc_submit, http_submit = worker.submits[1:]
        assert grpc_submit.prompt_token_ids == http_submit.prompt_token_ids
        assert grpc_submit.sampling.max_tokens == http_submit.sampling.max_tokens
        models = await stub.ListModels(inference_pb2.ListModelsRequest())
        assert [(m.id, m.max_model_len) for m in models.models] == [("tiny", 1024)]


async def test_errors_have_the_status_of_the_contract(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:secret\n")
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with (
        running_router(model, [worker], api_keys=str(keys)) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        sampling = common_pb2.SamplingParams
        too_long = common_pb2.TokenSequence(token_ids=[1] * 2000)
        cases: list[tuple[Any, grpc.StatusCode]] = [
            (ask(model="gpt-4"), grpc.StatusCode.NOT_FOUND),
            (ask(text=""), grpc.StatusCode.INVALID_ARGUMENT),
            (inference_pb2.GenerateRequest(model="tiny"), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(text=None, chat=inference_pb2.ChatPrompt()), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(text=None, tokens=too_long), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling=sampling(temperature=-1)), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling=sampling(temperature=float("nan"))), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling=sampling(max_tokens=0)), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling=sampling(prompt_logprobs=1)), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling=sampling(n=2)), grpc.StatusCode.UNIMPLEMENTED),
            (ask(cache_salt=""), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(text="x" * 5_000_000), grpc.StatusCode.INVALID_ARGUMENT),
        ]
        for request, status in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read(stub.Generate(request, metadata=[("authorization", "Bearer secret")]))
            assert caught.value.code() == status, request
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read(stub.Generate(ask()))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert worker.submits == []


async def test_a_cancelled_or_late_call_ends_on_the_worker(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    worker.pause_at = 3
    async with (
        running_router(model, [worker]) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(ask())
        await call.read()
        call.cancel()
        await until(lambda: worker.cancels and not worker.running)
        for timeout_s in (0.3, 2.0, 10.0, 30.0):  # of a slow machine it may never get there
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read(stub.Generate(ask(), timeout=timeout_s))
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if len(worker.submits) > 1:
                break
        await until(lambda: len(worker.cancels) == len(worker.submits) > 1 and not worker.running)


async def test_health_serves_and_the_example_client_prints_the_answer(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with (
        running_router(model, [worker]) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
    ):
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="diptych.v1.Inference")
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        example = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "docs/examples/grpc_client.py"),
            router.grpc,
            "What is the capital of France?",
            env={"PYTHONPATH": str(ROOT / "src"), "PYTHONSAFEPATH": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await example.communicate()
        assert out.decode().startswith(ANSWER)
        assert example.returncode == 0


async def _read(call: Any) -> list[Any]:
    return [piece async for piece in call]


async def test_a_call_that_nobody_reads_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "WRITE_TIMEOUT_S", 0.3)
    worker = FakeWorker("a1", AGGREGATED, [5] * 1000)
    async with (
        running_router(model, [worker]) as router,
        grpc.aio.insecure_channel(
            router.grpc, options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        ) as channel,
    ):
        request = ask(sampling={"max_tokens": 1000, "logprobs": 20}, return_token_ids=True)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        assert (await call.read()).text is not None
        running = 'vllm:num_requests_running{model_name="tiny"}'
        assert await router.metric(running) == 1

        async def is_idle() -> bool:
            return await router.metric(running) == 0

        await until(is_idle)
        await until(lambda: not worker.running)
        call.cancel()
