"""The public gRPC API."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from diptych.errors import InvalidRequestError, RequestAbortedError, RequestTooLargeError
from diptych.outputs import LogprobsAt
from diptych.proto import common_pb2, inference_pb2, inference_pb2_grpc
from diptych.rpc import Service
from diptych.services.router.formats import top_token_ids
from diptych.services.router.inference import GenerationCall, Inference
from diptych.services.router.openai_api import COMPLETION_MAX_TOKENS, check_cache_salt
from diptych.services.router.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from diptych.services.router.request_ids import client_request_id
from diptych.services.router.served import Served
from diptych.text.output_processor import OutputDelta, RequestState
from diptych.text.tokenizer import Tokenizer
from diptych.wire import sampling_from_proto

WRITE_TIMEOUT_S = 60.0
SERVICE_NAME = "diptych.v1.Inference"


class Front(inference_pb2_grpc.InferenceServicer):
    """The servicer of `diptych.v1.Inference`."""

    def __init__(self, inference: Inference, served: Served, max_request_bytes: int) -> None:
        self._inference = inference
        self._max_request_bytes = max_request_bytes
        self._served = served

    def service(self) -> Service:
        """For `rpc.RpcServer`."""
        return Service(SERVICE_NAME, inference_pb2_grpc.add_InferenceServicer_to_server, self)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Stream one completion. A call cancelled, late or not read ends everywhere."""
        metadata, tenant = self._check_caller(context)
        given = metadata.get("x-request-id")
        request_id = client_request_id(given, self._served.clock.new_id())
        await context.send_initial_metadata([("x-request-id", request_id)])
        call = self._call(request, tenant, context.time_remaining())
        answer = _Answer(
            request_id=request_id,
            model=self._served.model(request.model),
            created=int(self._served.clock.unix()),
            return_token_ids=request.return_token_ids,
            logprobs=call.sampling.logprobs,
            tokenizer=self._inference.processor.tokenizer,
        )
        async with self._inference.generate(call) as generation:
            async for delta in generation.deltas:
                await _write(context, answer.message(generation.state, delta))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        self._check_caller(context)
        length = self._inference.max_model_len or 0
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(id=name, max_model_len=length) for name in self._served.models
            ]
        )

    def _check_caller(self, context: Any) -> tuple[dict[str, str], str]:
        """The call's metadata, and the name of its API key; empty where none are in use."""
        metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        return metadata, self._served.keys.check(metadata.get("authorization")) or ""

    def _call(
        self, request: inference_pb2.GenerateRequest, tenant: str, remaining_s: float | None
    ) -> GenerationCall:
        if request.ByteSize() > self._max_request_bytes:
            raise RequestTooLargeError(f"a request has at most {self._max_request_bytes} bytes")
        self._served.model(request.model)
        prompt = _prompt(request)
        default = None if isinstance(prompt, ChatPrompt) else COMPLETION_MAX_TOKENS
        sampling = sampling_from_proto(request.sampling, max_tokens=default)
        if sampling.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available with a stream", param="prompt_logprobs"
            )
        salt = request.cache_salt if request.HasField("cache_salt") else None
        return GenerationCall(
            request_id=self._served.ids.new(),
            prompt=prompt,
            sampling=sampling,
            priority=request.priority,
            cache_salt=check_cache_salt(salt),
            tenant=tenant,
            timeout_s=remaining_s,
        )


async def _write(context: Any, message: inference_pb2.GenerateResponse) -> None:
    """Send one piece.

    Raises:
        RequestAbortedError: the client reads nothing for so long that its place is needed.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        raise RequestAbortedError("the client does not read") from None


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "tokens":
        return TokensPrompt(tuple(request.tokens.token_ids))
    if kind != "chat":
        raise InvalidRequestError("a prompt is needed: text, tokens or chat", param="prompt")
    if not request.chat.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    messages = []
    for message in request.chat.messages:
        plain = {"role": message.role, "content": message.content}
        if message.HasField("name"):
            plain["name"] = message.name
        messages.append(plain)
    return ChatPrompt(messages=tuple(messages))


class _Answer:
    """Pieces of one answer as messages."""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        return_token_ids: bool,
        logprobs: int | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._head = inference_pb2.GenerateResponse(
            request_id=request_id, model=model, created_unix_s=created
        )
        self._return_token_ids = return_token_ids
        self._logprobs = logprobs
        self._tokenizer = tokenizer

    def message(self, state: RequestState, delta: OutputDelta) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse(text=delta.text)
        message.MergeFrom(self._head)
        if self._return_token_ids:
            message.token_ids.extend(delta.token_ids)
        if self._logprobs is not None:
            for token_id, at in zip(delta.token_ids, delta.logprobs or [], strict=False):
                entry = self._token(at, token_id)
                top = top_token_ids(at, self._logprobs)
                entry.top_logprobs.extend(self._token(at, other) for other in top)
                message.logprobs.append(entry)
        if delta.finish_reason is not None:
            message.finish_reason = cast(common_pb2.FinishReason, int(delta.finish_reason))
            if delta.stop_reason is not None:
                message.stop_reason = str(delta.stop_reason)
            message.usage.CopyFrom(_usage(state))
        return message

    def _token(self, at: LogprobsAt, token_id: int) -> inference_pb2.TokenLogprob:
        return inference_pb2.TokenLogprob(
            token_id=token_id,
            token=self._tokenizer.token_text(token_id),
            logprob=at[token_id].logprob,
            utf8=self._tokenizer.token_bytes(token_id),
        )


def _usage(state: RequestState) -> inference_pb2.Usage:
    prompt, completion = len(state.request.prompt_token_ids), len(state.token_ids)
    return inference_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_tokens=state.num_cached_tokens,
    )
