"""A worker process from start to end: load, register, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from diptych.addresses import check_bindable, reachable_address
from diptych.clock import Clock, SystemClock
from diptych.config import EngineConfig, RedisConfig, WorkerConfig
from diptych.connectors.tickets import TicketKeys
from diptych.models.config import ModelConfig
from diptych.observe import AdminServer, Status, new_registry
from diptych.proto import worker_pb2_grpc
from diptych.registry import Heartbeat, MemberLoad, Registry, WorkerRecord
from diptych.rpc import RpcServer, Service
from diptych.worker.engine import Engine
from diptych.worker.identity import WorkerIdentity
from diptych.worker.metrics import WorkerMetrics
from diptych.worker.servicer import WorkerServicer
from diptych.worker.setup import check_transfers, needs_store, wait_for_store, with_connector

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SERVICE = "diptych.v1.Worker"
# Whoever uses a worker holds a stream to it: a connection without a call is one that was left.
_IDLE_S = 3.0


class Stopped(Exception):
    """A signal came while the worker was still loading."""


@contextlib.asynccontextmanager
async def _pumping(servicer: WorkerServicer) -> AsyncIterator[list[asyncio.Task[None]]]:
    """The servicer at work: its pump and what runs beside it, ended with everything that is left
    when the block ends."""
    tasks = [
        asyncio.create_task(servicer.pump(), name="pump"),
        asyncio.create_task(servicer.keep_times(), name="times"),
        asyncio.create_task(servicer.pump_peers(), name="pump peers"),
    ]
    try:
        yield tasks
    finally:
        await servicer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _await(work: Awaitable[T]) -> T:
    return await work


class WorkerProcess:
    """One worker. `main(stop)` is its life."""

    def __init__(
        self,
        role: str,
        config: WorkerConfig,
        engine_config: EngineConfig,
        redis: RedisConfig,
        *,
        resolve_model: Callable[[str, str | None], Path],
        start_engine: Callable[[EngineConfig], Awaitable[Engine]],
        clock: Clock | None = None,
    ) -> None:
        """`start_engine` returns once the engine is ready; cancelling it ends what it started."""
        self._role = role
        self._config = config
        self._engine_config = engine_config
        self._redis = redis
        self._resolve_model = resolve_model
        self._start_engine = start_engine
        self._clock = clock or SystemClock()
        self._metrics_registry = new_registry()
        self._stop = asyncio.Event()
        self._not_ready = "starting"
        self._heartbeat: Heartbeat | None = None
        self._dead = ""

    async def main(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set.

        Raises:
            DiptychError: it cannot start (configuration, port in use, model), or the engine died.
        """
        self._stop = stop
        config = self._config
        check_transfers(self._role, self._engine_config, config)
        keys = None if config.ticket_keys is None else TicketKeys.load(config.ticket_keys)
        check_bindable(config.host, config.port)
        admin = AdminServer(
            config.host,
            config.admin_port,
            registry=self._metrics_registry,
            ready=self._ready,
            live=self._live,
        )
        with contextlib.suppress(Stopped):
            async with admin, self._registry() as registry, self._engine(registry) as engine:
                await self._serve(engine, admin, registry, keys)

    @contextlib.asynccontextmanager
    async def _registry(self) -> AsyncIterator[Registry | None]:
        if self._redis.redis is None:
            yield None
            return
        registry = Registry(self._redis, self._clock)
        try:
            yield registry
        finally:
            await registry.close()

    @contextlib.asynccontextmanager
    async def _engine(self, registry: Registry | None) -> AsyncIterator[Engine]:
        """The model's files, the store's address, then the engine; a signal ends the wait."""
        config = self._engine_config
        name = config.served_model_name or config.model
        self._say("fetching the model")
        path = await self._unless_stopped(
            asyncio.to_thread(self._resolve_model, config.model, config.revision)
        )
        config = dataclasses.replace(config, model=str(path), served_model_name=name)
        place = None
        if needs_store(self._role, config, self._config):
            self._say("looking for the KV store")
            place = await self._unless_stopped(wait_for_store(self._config, registry, self._say))
        config = with_connector(config, self._role, self._config, place, self._redis.redis)
        self._engine_config = config
        self._say("the engine is loading")
        engine = await self._unless_stopped(_await(self._start_engine(config)))
        try:
            yield engine
        finally:
            await engine.close()

    async def _serve(
        self,
        engine: Engine,
        admin: AdminServer,
        registry: Registry | None,
        keys: TicketKeys | None,
    ) -> None:
        """Serve until the signal, then drain; or until the engine dies.

        Raises:
            EngineDeadError: the engine died.
        """
        server = RpcServer(self._config.host, self._config.port, idle_s=_IDLE_S)
        server.bind()
        identity = self._identity(admin, server)
        metrics = WorkerMetrics(self._metrics_registry, identity.model, identity.worker_id)
        metrics.start(engine.info.num_kv_blocks)
        servicer = WorkerServicer(
            engine,
            identity,
            metrics,
            config=self._config,
            engine_config=self._engine_config,
            keys=keys,
            clock=self._clock,
        )
        server.add(Service(_SERVICE, worker_pb2_grpc.add_WorkerServicer_to_server, servicer))
        async with server, _pumping(servicer) as tasks:
            await server.set_serving(True)
            async with self._registered(registry, servicer, engine, identity):
                self._not_ready = ""
                logger.info("serving %s as %s on %s", identity.model, self._role, identity.address)
                await self._until_end(*tasks)
                self._say("draining")
                servicer.draining = True
            await server.set_serving(False)
            left = await servicer.drain(self._config.drain_s)
            logger.info("drained; %d requests left", left)

    async def _until_end(self, pump: asyncio.Task[None], *beside: asyncio.Task[None]) -> None:
        """Wait for the signal, or for the engine's death.

        Raises:
            EngineDeadError: the engine died.
            Exception: a fault of ours in what runs beside it: without it requests would be stuck.
        """
        stop = asyncio.ensure_future(self._stop.wait())
        left: set[asyncio.Future[Any]] = {stop, pump, *beside}
        try:
            while not (stop.done() or pump.done()):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._check(task)
        finally:
            stop.cancel()

    def _check(self, task: asyncio.Future[Any]) -> None:
        """Raise what a task that is over raised, and be dead by it."""
        if (error := task.exception()) is not None:
            self._dead = str(error)
            self._say(self._dead)
            raise error

    @contextlib.asynccontextmanager
    async def _registered(
        self,
        registry: Registry | None,
        servicer: WorkerServicer,
        engine: Engine,
        identity: WorkerIdentity,
    ) -> AsyncIterator[None]:
        """In the registry, with the current load, until the block ends."""
        if registry is None:
            yield
            return

        def record() -> WorkerRecord:
            load = servicer.load()
            return WorkerRecord(
                worker_id=identity.worker_id,
                incarnation=identity.incarnation,
                role=identity.role,
                address=identity.address,
                admin_address=identity.admin_address,
                model=identity.model,
                kv_namespace=engine.info.kv_namespace,
                max_model_len=engine.info.max_model_len,
                draining=servicer.draining,
                load=MemberLoad(
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    num_pending_tokens=load.num_pending_tokens,
                    kv_usage=load.kv_usage,
                    num_kv_blocks=load.num_kv_blocks,
                ),
            )

        async with Heartbeat(registry, record) as self._heartbeat:
            yield

    def _identity(self, admin: AdminServer, server: RpcServer) -> WorkerIdentity:
        config = self._config
        address = reachable_address(
            config.host, server.port, config.advertise_address, self._redis.redis
        )
        return WorkerIdentity(
            worker_id=config.worker_id or f"{self._role}-{self._clock.new_id()[:8]}",
            incarnation=self._clock.new_id(),
            role=self._role,
            address=address,
            admin_address=f"{address.rpartition(':')[0]}:{admin.port}",
            model=str(self._engine_config.served_model_name),
            vocab_size=ModelConfig.from_directory(Path(self._engine_config.model)).vocab_size,
        )

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, or give it up when the signal comes.

        Raises:
            Stopped: the signal came first.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _say(self, reason: str) -> None:
        if reason != self._not_ready:
            logger.info("not ready: %s", reason)
        self._not_ready = reason

    def _ready(self) -> Status:
        if self._not_ready:
            return Status(False, self._not_ready)
        if self._heartbeat is not None and not self._heartbeat.ready:
            return Status(False, f"not registered yet: {self._heartbeat.problem}")
        return Status(True)

    def _live(self) -> Status:
        return Status(not self._dead, self._dead or "ok")
