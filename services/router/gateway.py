"""The OpenAI HTTP API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import msgspec
from aiohttp import web

import diptych
from diptych.errors import (
    DiptychError,
    EngineError,
    InvalidRequestError,
    RequestTooLargeError,
)
from diptych.observe import Status
from diptych.rpc import log_unforeseen
from diptych.services.router.chat_form import ChatForm
from diptych.services.router.completion_form import CompletionForm
from diptych.services.router.formats import Answering, Format, error_body
from diptych.services.router.inference import GenerationCall, Inference
from diptych.services.router.merge import News, run_calls
from diptych.services.router.metrics import RouterMetrics
from diptych.services.router.openai_api import ApiRequest, parse_chat, parse_completion
from diptych.services.router.request_ids import HEADER, client_request_id
from diptych.services.router.served import Served
from diptych.text.output_processor import RequestState

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
BODY_TIMEOUT_S, BODY_STALL_S = 60.0, 20.0
WRITE_TIMEOUT_S = 60.0
_REQUEST_ID = web.RequestKey("request_id", str)
_TENANT = web.RequestKey("tenant", str)
_DONE = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MethodNotAllowedError(InvalidRequestError):
    http_status: ClassVar[int] = 405
    code: ClassVar[str | None] = "method_not_allowed"


class PathNotFoundError(InvalidRequestError):
    http_status: ClassVar[int] = 404
    code: ClassVar[str | None] = "not_found"


class RequestTimeoutError(InvalidRequestError):
    http_status: ClassVar[int] = 408
    code: ClassVar[str | None] = "request_timeout"


class Gateway:
    """The aiohttp application in front of `Inference`."""

    def __init__(
        self,
        inference: Inference,
        served: Served,
        ready: Callable[[], Status],
        metrics: RouterMetrics,
        max_body_bytes: int,
    ) -> None:
        self._inference = inference
        self._metrics = metrics
        self._served = served
        self._created = int(served.clock.unix())
        self._max_body_bytes = max_body_bytes
        self._ready = ready

    def application(self) -> web.Application:
        """A fresh application; its server must cancel handlers of clients that left."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._max_body_bytes)
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/health", self._readyz),
                web.get("/version", self._version),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._get_model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id, check its key, and put every error into OpenAI form."""
        fresh = self._served.clock.new_id()
        request[_REQUEST_ID] = fresh
        request[_TENANT] = ""
        try:
            request[_REQUEST_ID] = client_request_id(request.headers.get(HEADER), fresh)
            if request.path.startswith("/v1/"):
                name = self._served.keys.check(request.headers.get("Authorization"))
                request[_TENANT] = name or ""
            response = await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = _error_response(_from_http(error, request))
        except DiptychError as error:
            response = _error_response(error)
        except ConnectionError:
            raise
        except Exception as error:
            response = _error_response(_unforeseen(request, error))
        if request.path.startswith("/v1/"):
            self._metrics.http_responses.labels(str(response.status)).inc()
        if not response.prepared:
            response.headers[HEADER] = request[_REQUEST_ID]
        return response

    async def _livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(status=200 if ready.ok else 503, text=f"{ready.reason}\n")

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": diptych.__version__})

    async def _list_models(self, request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [self._model(name) for name in self._served.models]}
        )

    async def _get_model(self, request: web.Request) -> web.Response:
        return _json(self._model(self._served.model(request.match_info["model"])))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "diptych",
            "root": self._served.models[0],
            "parent": None,
            "max_model_len": self._inference.max_model_len,
        }

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        api = parse_completion(await self._body(request))
        answering = self._answering(request, api, "cmpl")
        return await self._answer(request, api, CompletionForm(answering))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        api = parse_chat(await self._body(request))
        answering = self._answering(request, api, "chatcmpl")
        return await self._answer(request, api, ChatForm(answering))

    async def _body(self, request: web.Request) -> bytes:
        """The body, unpacked.

        Raises:
            RequestTooLargeError: it is, or says it is, longer than allowed.
            RequestTimeoutError: it does not arrive.
            InvalidRequestError: it is not packed as its headers say.
        """
        if (request.content_length or 0) > self._max_body_bytes:
            raise RequestTooLargeError("the body is too large")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._whole(request)
        except TimeoutError:
            limits = f"{BODY_TIMEOUT_S:g} s, or nothing of it in {BODY_STALL_S:g} s"
            raise RequestTimeoutError(f"no whole body came in {limits}") from None
        except web.RequestPayloadError:
            raise InvalidRequestError("the body is not encoded as its headers say") from None

    async def _whole(self, request: web.Request) -> bytes:
        body = bytearray()
        while True:
            async with asyncio.timeout(BODY_STALL_S):
                part = await request.content.readany()
            if not part:
                return bytes(body)
            body += part
            if len(body) > self._max_body_bytes:
                raise RequestTooLargeError("the body is too large")

    def _answering(self, request: web.Request, api: ApiRequest, prefix: str) -> Answering:
        return Answering(
            response_id=f"{prefix}-{request[_REQUEST_ID]}",
            model=self._served.model(api.model),
            created=int(self._served.clock.unix()),
            api=api,
            tokenizer=self._inference.processor.tokenizer,
        )

    async def _answer(
        self, request: web.Request, api: ApiRequest, form: Format
    ) -> web.StreamResponse:
        calls = [
            GenerationCall(
                request_id=self._served.ids.new(),
                prompt=prompt,
                sampling=api.sampling,
                priority=api.priority,
                cache_salt=api.cache_salt,
                tenant=request[_TENANT],
            )
            for prompt in api.prompts
        ]
        if api.stream:
            return await self._stream(request, api, form, calls)
        states: list[RequestState | None] = [None] * len(calls)
        async with run_calls(self._inference, calls) as news:
            async for item in news:
                states[item.choice] = item.state
        return _json(form.response([state for state in states if state is not None]))

    async def _stream(
        self,
        request: web.Request,
        api: ApiRequest,
        form: Format,
        calls: Sequence[GenerationCall],
    ) -> web.StreamResponse:
        """Server-sent events. Nothing is sent before the first token, so that an error until then
        has its own status; later ones are an event."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                HEADER: request[_REQUEST_ID],
            }
        )
        try:
            await self._write_events(request, response, api, form, calls)
        except ConnectionError:
            logger.debug("%s: the client left", request[_REQUEST_ID])
        except Exception as error:
            if not response.prepared:
                raise
            named = error if isinstance(error, DiptychError) else _unforeseen(request, error)
            await _write(request, response, _event(error_body(named)) + _DONE)
        return response

    async def _write_events(
        self,
        request: web.Request,
        response: web.StreamResponse,
        api: ApiRequest,
        form: Format,
        calls: Sequence[GenerationCall],
    ) -> None:
        states: list[RequestState | None] = [None] * len(calls)
        async with run_calls(self._inference, calls) as news:
            async for item in news:
                if not response.prepared:
                    await response.prepare(request)
                body = _events(form, item, opens=states[item.choice] is None, api=api)
                states[item.choice] = item.state
                if body:
                    await _write(request, response, body)
        last = b""
        if api.include_usage:
            last = _event(form.usage_chunk([state for state in states if state is not None]))
        await _write(request, response, last + _DONE)
        await response.write_eof()


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Send a piece of a stream.

    Raises:
        ConnectionError: the client left, or reads nothing for so long that its place is needed.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError("the client does not read") from None


def _events(form: Format, item: News, *, opens: bool, api: ApiRequest) -> bytes:
    """The events for one piece of news; none where it shows nothing."""
    opening = form.opening(item.choice, item.state) if opens else None
    body = b"" if opening is None else _event(opening)
    delta = item.delta
    shows = api.continuous_usage or (
        delta.token_ids and (api.return_token_ids or api.sampling.logprobs is not None)
    )
    if delta.text or delta.finished or shows:
        body += _event(form.chunk(item.choice, item.state, delta))
    return body


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _error_response(error: DiptychError) -> web.Response:
    response = _json(error_body(error), error.http_status)
    if error.http_status in (429, 503):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _unforeseen(request: web.Request, error: Exception) -> DiptychError:
    """What a client is told of an error that has no name of ours, which is logged."""
    log_unforeseen(f"{request.method} {request.path}", error)
    return EngineError("internal error; see the router's log")


def _from_http(error: web.HTTPException, request: web.Request) -> DiptychError:
    """aiohttp's own errors in our tree."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return RequestTooLargeError("the body is too large")
    if error.status == 404:
        return PathNotFoundError(f"there is no {request.path[:200]}")
    if error.status == 405:
        return MethodNotAllowedError(f"{request.method} is not allowed on {request.path[:200]}")
    return InvalidRequestError(error.reason)
