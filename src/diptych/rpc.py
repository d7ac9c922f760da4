"""gRPC servers and channels as every service uses them: options, health, reflection, errors.

The one place where the error tree meets gRPC statuses. Besides status and message, an error
carries its class and the field at fault in the trailing metadata, so that a caller gets the same
error back.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from diptych import errors
from diptych.addresses import check_bindable
from diptych.config import MIB
from diptych.errors import ConfigError, DiptychError, InvalidRequestError

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * MIB
ERROR_KEY = "diptych-error"
PARAM_KEY = "diptych-param"

# gRPC sets TCP_NODELAY itself. Keepalive finds a peer that vanished without a FIN, within 20 s. Its
# timeout alone does not: a ping that is under way, by which gRPC measures a line in use, keeps its
# own from being sent, and by default each waits a minute.
_COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    # a second process on the same port must fail, not share the traffic
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # how long one attempt to connect may take, TLS and HTTP/2 included, whatever the name says:
    # a peer on a busy machine may need more than the 100 ms between first attempts
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# A channel without a call lets its connection go. One that is closed, too, stays connected, and
# connects again, until its last call is freed: calls are in cycles, freed only by the collector.
# Letting go forgets the connection and ends it only where no call is left to be freed: a server
# of such channels ends those without a call itself (`RpcServer`, `idle_s`).
_IDLE_MS = 2_000


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service of a server: full name, generated `add_..._to_server`, implementation."""

    name: str
    add_to_server: Callable[[Any, Any], Any]
    servicer: object


class RpcServer:
    """A grpc.aio server with health, reflection and error mapping.

    `async with` starts and stops it. Health starts as NOT_SERVING; `set_serving` changes it.
    `port` is known once bound; services that must know it are added between `bind` and `start`.
    With `idle_s` a connection ends once it has carried no call for that long.
    """

    def __init__(
        self,
        host: str,
        port: int,
        services: Sequence[Service] = (),
        *,
        stop_grace_s: float = 1.0,
        idle_s: float | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._services = list(services)
        self._stop_grace_s = stop_grace_s
        self._options = list(SERVER_OPTIONS)
        if idle_s is not None:
            self._options.append(("grpc.max_connection_idle_ms", round(1000 * idle_s)))
        self._health = health.aio.HealthServicer()
        self._server: Any = None

    @property
    def address(self) -> str:
        """host:port it listens on."""
        return f"{self.host}:{self.port}"

    def bind(self) -> None:
        """Take the port; calls wait until `start`.

        Raises:
            ConfigError: the address cannot be bound; the message names the port.
        """
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=self._options)
        self.port = _bind(server, self.host, self.port)
        self._server = server

    def add(self, service: Service) -> None:
        """One more service, before `start`."""
        self._services.append(service)

    async def start(self) -> None:
        """Serve; binds first where that was not done.

        Raises:
            ConfigError: as `bind`.
        """
        if self._server is None:
            self.bind()
        for service in self._services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [s.name for s in self._services]
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the standard health status of the server and of each service."""
        status = health_pb2.HealthCheckResponse.ServingStatus.Value(
            "SERVING" if serving else "NOT_SERVING"
        )
        for name in ("", *(s.name for s in self._services)):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Refuse new calls, give running ones `stop_grace_s`, then cancel them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(self._stop_grace_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns exceptions of our handlers into statuses; cancellation passes untouched."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/diptych."):
            return handler
        if handler.response_streaming:
            kind = "stream_stream" if handler.request_streaming else "unary_stream"
        else:
            kind = "stream_unary" if handler.request_streaming else "unary_unary"
        inner = getattr(handler, kind)
        wrap = _wrap_stream if inspect.isasyncgenfunction(inner) else _wrap_unary
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        deserializer = handler.request_deserializer
        return make(
            wrap(inner, details.method),
            request_deserializer=deserializer if handler.request_streaming else _try(deserializer),
            response_serializer=handler.response_serializer,
        )


def _try(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer that gives its error back: raised there it would be an UNKNOWN status."""

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return InvalidRequestError("the message is not a valid one of its type")

    return deserialize


def _wrap_unary(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, DiptychError):
                raise request
            return await inner(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return call


def _wrap_stream(inner: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            if isinstance(request, DiptychError):
                raise request
            async for response in inner(request, context):
                yield response
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(context: Any, error: Exception, method: str) -> None:
    """End the call with the error's status. Never returns normally."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, DiptychError):
        metadata = [(ERROR_KEY, type(error).__name__)]
        if error.param:
            metadata.append((PARAM_KEY, error.param))
        status = grpc.StatusCode[error.grpc_status]
        await context.abort(status, error.message, tuple(metadata))
    log_unforeseen(method, error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the service's log")


def log_unforeseen(what: str, error: Exception) -> None:
    """Log an error that has no name of ours: where it happened and its class, but not its message,
    which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed with %s\n%s", what, type(error).__name__, frames)


def open_channel(address: str) -> Any:
    """An insecure grpc.aio channel to `host:port` with a connection of its own."""
    options = [*CHANNEL_OPTIONS, ("grpc.client_idle_timeout_ms", _IDLE_MS)]
    return grpc.aio.insecure_channel(address, options=options)


_BY_STATUS: dict[grpc.StatusCode, type[DiptychError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedFeatureError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.RequestAbortedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StaleTicketError,
}


def _subclasses(base: type[DiptychError]) -> Iterator[type[DiptychError]]:
    yield base
    for child in base.__subclasses__():
        yield from _subclasses(child)


def error_from_rpc(error: grpc.RpcError) -> DiptychError:
    """The error of our tree that an `AioRpcError` stands for."""
    metadata = dict(error.trailing_metadata() or ())
    classes = {kind.__name__: kind for kind in _subclasses(DiptychError)}
    kind = classes.get(str(metadata.get(ERROR_KEY, "")))
    if kind is None or kind.grpc_status != error.code().name:
        kind = _BY_STATUS.get(error.code(), errors.EngineError)
    param = metadata.get(PARAM_KEY)
    message = error.details() or error.code().name
    return kind(message, param=None if param is None else str(param))


def _bind(server: Any, host: str, port: int) -> int:
    """Bind and return the port taken."""
    check_bindable(host, port)
    shown = f"[{host}]" if ":" in host else host
    try:
        return int(server.add_insecure_port(f"{shown}:{port}"))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param="port") from error
