"""The router process: wiring only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from diptych.addresses import check_bindable
from diptych.clock import Clock, SystemClock
from diptych.config import EngineConfig, RedisConfig, RouterConfig
from diptych.connectors.tickets import TicketIssuer, TicketKeys
from diptych.errors import ConfigError
from diptych.models.config import ModelConfig
from diptych.models.fetch import resolve_model
from diptych.observe import IDLE_S, AdminServer, Status, new_registry, run_until_signal
from diptych.registry import Registry, Watch, WorkerRecord
from diptych.rpc import RpcServer
from diptych.services.router.api_keys import ApiKeys
from diptych.services.router.dispatch import Dispatcher, DispatchTimes
from diptych.services.router.front import Front
from diptych.services.router.gateway import Gateway
from diptych.services.router.inference import Inference
from diptych.services.router.membership import (
    Members,
    registry_membership,
    static_membership,
)
from diptych.services.router.metrics import RouterMetrics
from diptych.services.router.paces import Paces
from diptych.services.router.picker import LeastTime
from diptych.services.router.request_ids import InternalIds
from diptych.services.router.served import Served
from diptych.services.router.ways import Auto, Direct, HandoffWays, StoreOnly
from diptych.services.router.worker_link import LinkTimes, WorkerLink
from diptych.text.chat_template import ChatTemplate
from diptych.text.no_tokenizer import NoTokenizer
from diptych.text.processor import Processor
from diptych.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# after the drain; aiohttp waits twice this long before it cancels a handler
_HANDLERS_END_S = 0.25
_CUT_S = 0.5
_WAYS: dict[str, HandoffWays] = {"store": StoreOnly(), "direct": Direct(), "auto": Auto()}


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What a background task (the planner) may use of a running router."""

    members: Members
    inference: Inference
    registry: CollectorRegistry
    clock: Clock


Background = Callable[[RouterParts], "asyncio.Task[None]"]
"""Starts a task beside the router; it is cancelled when the router stops."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a started router listens."""

    http: int
    grpc: int
    admin: int


def run(
    router: RouterConfig,
    redis: RedisConfig,
    engine: EngineConfig,
    background: Background | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        background: started once the router serves, e.g. the planner.

    Raises:
        SystemExit: with code 1 after one line on stderr, where the router cannot start.
    """

    async def main(stop: asyncio.Event) -> None:
        async with serve(router, redis, engine, background=background):
            await stop.wait()

    run_until_signal("router", main)


@asynccontextmanager
async def serve(
    router: RouterConfig,
    redis: RedisConfig,
    engine: EngineConfig,
    *,
    clock: Clock | None = None,
    link_times: LinkTimes | None = None,
    dispatch_times: DispatchTimes | None = None,
    background: Background | None = None,
) -> AsyncIterator[Ports]:
    """A router that serves while the block runs. Its admin port answers while the model's files
    are still being fetched.

    Raises:
        ConfigError: a port is in use, or a key file is not valid.
        ModelLoadError: the model's files cannot be had or read.
    """
    check_bindable(router.host, router.port)
    clock = clock or SystemClock()
    keys = ApiKeys(router.api_keys, clock)
    routing = _Routing.make(router, redis, engine, clock, link_times, dispatch_times)
    readiness = _Readiness(routing.members, router.handoff)
    async with AsyncExitStack() as stack:
        admin = AdminServer(
            router.host, router.admin_port, registry=routing.metrics.registry, ready=readiness
        )
        await stack.enter_async_context(admin)
        inference = Inference(
            processor=await asyncio.to_thread(_load_processor, engine, clock),
            dispatcher=routing.dispatcher,
            members=routing.members,
            metrics=routing.metrics,
            clock=clock,
            max_in_flight=router.max_in_flight,
            timeout_s=router.request_timeout_s,
        )
        stack.push_async_callback(inference.close)
        readiness.watch = await _join(stack, routing.members, router, redis, clock)
        readiness.inference = inference
        served = Served(
            models=served_names(engine),
            keys=keys,
            ids=InternalIds(routing.incarnation),
            clock=clock,
        )
        rpc = RpcServer(
            router.host,
            router.grpc_port,
            [Front(inference, served, router.max_body_bytes).service()],
        )
        await stack.enter_async_context(rpc)
        gateway = Gateway(inference, served, readiness, routing.metrics, router.max_body_bytes)
        port = await stack.enter_async_context(_http(gateway.application(), router))
        await rpc.set_serving(True)
        stack.push_async_callback(_drain, inference, routing.dispatcher, readiness, router.drain_s)
        if background is not None:
            parts = RouterParts(routing.members, inference, routing.metrics.registry, clock)
            stack.push_async_callback(_end, background(parts))
        logger.info("serving %s on %s:%d", served_names(engine)[0], router.host, port)
        yield Ports(http=port, grpc=rpc.port, admin=admin.port)


@dataclass(frozen=True, slots=True)
class _Routing:
    """The half that knows workers."""

    incarnation: str
    members: Members
    dispatcher: Dispatcher
    metrics: RouterMetrics

    @classmethod
    def make(
        cls,
        router: RouterConfig,
        redis: RedisConfig,
        engine: EngineConfig,
        clock: Clock,
        link_times: LinkTimes | None,
        dispatch_times: DispatchTimes | None,
    ) -> _Routing:
        incarnation = clock.new_id()
        names = served_names(engine)
        times = link_times or LinkTimes(silence_s=redis.liveness_s)
        keys = TicketKeys.load(router.ticket_keys) if router.ticket_keys else TicketKeys.drawn()

        def make_link(address: str, on_change: Callable[[], None]) -> WorkerLink:
            return WorkerLink(
                address,
                router_incarnation=incarnation,
                clock=clock,
                keys=keys,
                times=times,
                on_change=on_change,
            )

        members = Members(make_link, names.__contains__)
        metrics = RouterMetrics(new_registry(), names[0], members.count)
        paces = Paces()
        dispatcher = Dispatcher(
            members,
            LeastTime(clock, paces),
            TicketIssuer(keys, incarnation),
            clock,
            metrics,
            dispatch_times
            or DispatchTimes(
                first_token_s=router.first_token_timeout_s, handoff_s=router.handoff_timeout_s
            ),
            _WAYS[router.handoff],
            paces,
        )
        return cls(incarnation, members, dispatcher, metrics)


class _Readiness:
    """Ready once the model's files are read, the registry has answered, and a path is complete, the
    links of its workers tested where KV may go directly; not any more once the router drains.

    Links of workers that come later are not waited for."""

    def __init__(self, members: Members, handoff: str) -> None:
        self._members = members
        self._awaits_links = handoff != "store"
        self.inference: Inference | None = None
        self.watch: Watch[WorkerRecord] | None = None
        self.draining = False

    def __call__(self) -> Status:
        if self.draining:
            return Status(False, "draining")
        if self.inference is None:
            return Status(False, "the model's files are being read")
        if self.watch is not None and self.watch.problem:
            return Status(False, self.watch.problem)
        status = self.inference.readiness()
        if status.ok and self._awaits_links:
            if self._members.tests_links:
                return Status(False, "links between workers are being tested")
            self._awaits_links = False
            if self._members.has_untested_links:
                logger.warning("links between workers were not tested in time")
        return status


async def _join(
    stack: AsyncExitStack,
    members: Members,
    router: RouterConfig,
    redis: RedisConfig,
    clock: Clock,
) -> Watch[WorkerRecord] | None:
    """Learn of workers from the fixed list, or from the registry, whose watch is returned."""
    if router.workers:
        await stack.enter_async_context(static_membership(members, router.workers))
        return None
    registry = Registry(redis, clock)
    stack.push_async_callback(registry.close)
    return await stack.enter_async_context(registry_membership(members, registry))


def served_names(engine: EngineConfig) -> tuple[str, ...]:
    """Names in the API, the default first: the served name, or the model as it was given."""
    return (engine.served_model_name or engine.model,)


def _load_processor(engine: EngineConfig, clock: Clock) -> Processor:
    """Fetch the model's files and read what the router needs of them; no weights, no torch."""
    path: Path = resolve_model(engine.model, engine.revision, progress=False)
    model_config = ModelConfig.from_directory(path)
    return Processor(
        model_config,
        _load_tokenizer(engine, path),
        ChatTemplate.from_directory(path, clock),
        max_model_len=engine.max_model_len or model_config.max_position,
        max_logprobs=engine.max_logprobs,
        rng=clock.random(),
    )


def _load_tokenizer(engine: EngineConfig, path: Path) -> Tokenizer:
    """The model's. One of random weights may have none: it is served by token ids only."""
    if engine.load_format == "dummy" and not (path / "tokenizer.json").exists():
        logger.warning("there is no tokenizer: prompts must be token ids, and answers have no text")
        return NoTokenizer()
    return Tokenizer.from_directory(path)


@asynccontextmanager
async def _http(app: web.Application, router: RouterConfig) -> AsyncIterator[int]:
    """The HTTP server; gives its port. Handlers of clients that leave are cancelled."""
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_HANDLERS_END_S,
        keepalive_timeout=IDLE_S,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, router.host, router.port).start()
        except OSError as error:  # taken since it was checked
            raise ConfigError(f"cannot listen on {router.host}:{router.port}: {error}") from None
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _drain(
    inference: Inference, dispatcher: Dispatcher, readiness: _Readiness, drain_s: float
) -> None:
    """Let requests under way end; what comes in meanwhile is still served."""
    readiness.draining = True
    left = await inference.wait_idle(drain_s)
    if left:
        logger.warning("%d requests did not end in %.0f s and are cut", left, drain_s)
        dispatcher.stop()
        await inference.wait_idle(_CUT_S)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
