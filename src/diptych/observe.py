"""What every service process shows and how it stops: logs, metrics, the admin port, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from diptych.addresses import check_bindable
from diptych.errors import ConfigError, DiptychError

logger = logging.getLogger(__name__)

IDLE_S = 75.0
"""How long an HTTP connection may be without a whole request header, new or between requests: more
than the minute for which proxies keep theirs, so that it is they who let go."""


def configure_logging(service: str) -> None:
    """Log to stderr, one line a record; the level comes from DIPTYCH_LOG_LEVEL (default INFO)."""
    level = os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {service}[%(process)d] %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(shorten_broken_http)


def shorten_broken_http(record: logging.LogRecord) -> bool:
    """A client that does not speak HTTP is one line: the error would quote what it sent."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "a client sent broken HTTP: %s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
    return True


def new_registry() -> CollectorRegistry:
    """A Prometheus registry of this process alone, with the process's own figures in it."""
    registry = CollectorRegistry(auto_describe=True)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class Status(NamedTuple):
    """A yes or no and, for a no, why."""

    ok: bool
    reason: str = "ok"


def always_ok() -> Status:
    """The answer of a process that lives as long as its event loop does."""
    return Status(True)


class AdminServer:
    """Plain HTTP beside a service: /livez, /readyz, /metrics; `async with` starts and stops it.

    `ready` and `live` are asked at every request; a no answers 503 with the reason as text.
    `routes` adds more. `port` is known once started.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], Status],
        live: Callable[[], Status] = always_ok,
        routes: Sequence[web.RouteDef] = (),
    ) -> None:
        self.host = host
        self.port = port
        self._registry = registry
        self._ready = ready
        self._live = live
        self._routes = routes
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ConfigError: the address cannot be bound; the message names the port.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                *self._routes,
            ]
        )
        check_bindable(self.host, self.port)
        runner = web.AppRunner(
            app, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
        )
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self.host, self.port)
        try:
            await site.start()
        except OSError as error:  # taken since it was checked
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error}") from None
        self.port = int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:
        return _answer(self._live())

    async def _readyz(self, request: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

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


def _answer(status: Status) -> web.Response:
    return web.Response(status=200 if status.ok else 503, text=f"{status.reason}\n")


async def until_signal(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stop)`; the first SIGTERM or SIGINT sets `stop`, the second cancels `main`.

    The handlers are set explicitly: a process started in the background of a shell ignores SIGINT.
    """
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("%s again: stopping at once", number.name)
            task.cancel()
        else:
            logger.info("%s: stopping", number.name)
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run_until_signal(
    service: str, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
) -> None:
    """The body of a service's `run`: log, run `main(stop)` on a fresh loop, end when it ends.

    Returns on a clean stop. On an error of ours it writes one line to stderr.

    Raises:
        SystemExit: with code 1, after an error of ours.
    """
    configure_logging(service)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(until_signal(main))
    except DiptychError as error:
        sys.stderr.write(f"diptych {service}: {error.message}\n")
        raise SystemExit(1) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
