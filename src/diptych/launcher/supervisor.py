"""Starts the processes of one machine, keeps them running, scales the pools, stops all of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from diptych.config_sources import Settings
from diptych.embedded_redis import EmbeddedRedis
from diptych.errors import DeadlineError, DiptychError, UnavailableError
from diptych.launcher.child import Child, free_ports
from diptych.launcher.control import ControlServer
from diptych.launcher.plan import Machine, ProcessSpec, kvstore_spec, router_spec, worker_spec
from diptych.launcher.silence import silent_service
from diptych.tasks import end_task

_FIRST_BACKOFF_S = 1.0
_MOST_BACKOFF_S = 30.0
_REDIS_POLL_S = 0.5


class Supervisor:
    """One machine's processes; `say` shows progress to the person who waits."""

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        log_directory: Path,
        say: Callable[[str], None],
        *,
        aggregated: bool = False,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._log_directory = log_directory
        self._say = say
        self._aggregated = aggregated
        self._machine = Machine.here()
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._drains: set[asyncio.Task[None]] = set()
        self._redis: EmbeddedRedis | None = None
        self._redis_url: str | None = settings["redis"].redis
        self._ticket_keys = str(directory / "ticket-keys")
        self._control = directory / "supervisor.sock"
        self._server = ControlServer(self, self._control)
        self._scaling = asyncio.Lock()
        self._closing = False
        self._gpus: dict[str, int] = {}
        self._told: set[str] = set()

    @property
    def redis_url(self) -> str | None:
        """Of the directory; None where there is none."""
        return self._redis_url

    @property
    def children(self) -> dict[str, Child]:
        return dict(self._children)

    async def start(self) -> None:
        """Start everything and return when all of it is ready.

        Raises:
            DiptychError: a process ended or did not become ready.
        """
        self._write_ticket_keys()
        await self._server.start()
        if not self._aggregated:
            self._start_redis()
        specs = self._specs()
        for spec in specs:
            await self._spawn(spec)
        self._say(f"starting {', '.join(spec.name for spec in specs)} (engines load the model)")
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(self._wait_first_ready(spec.name))
        for name in self._children:
            self._watchers[name] = asyncio.create_task(self._watch(name, is_ready=True))

    async def stop(self) -> None:
        """End every process: the front door first, then workers, store and directory."""
        self._closing = True
        self._server.close()
        async with self._scaling:  # a worker that is being started is known after this
            for watcher in self._watchers.values():
                watcher.cancel()
        timeout_s = self._settings["up"].stop_timeout_s
        for group in _stop_order(self._children):
            await asyncio.gather(*(child.stop(timeout_s) for child in group))
        for task in list(self._drains):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)

    def kill(self) -> None:
        """End every process at once, so that a `stop` under way has little to wait for."""
        self._closing = True
        for child in self._children.values():
            child.kill()

    async def scale(self, pool: str, replicas: int) -> int:
        """Start or drain workers of a pool until it has `replicas`; returns how many it has.

        Raises:
            UnavailableError: everything is being stopped.
            OSError: a process cannot be started.
        """
        async with self._scaling:
            if self._closing:
                raise UnavailableError("the launcher is stopping")
            while len(self._pool(pool)) < replicas:
                spec = self._new_worker(pool, self._free_index(pool))
                await self._spawn(spec)
                self._watchers[spec.name] = asyncio.create_task(self._watch(spec.name))
                self._say(f"{spec.name}: started for the load")
            for name in self._pool(pool)[replicas:]:
                self._stopping.add(name)
                self._say(f"{name}: drains, idle enough without it")
                task = asyncio.create_task(self._drain(name))
                self._drains.add(task)
                task.add_done_callback(self._drains.discard)
            return len(self._pool(pool))

    def replicas(self, pool: str) -> int:
        """Workers of a pool, without those that drain."""
        return len(self._pool(pool))

    def _specs(self) -> list[ProcessSpec]:
        if self._aggregated:
            workers = [self._new_worker("aggregated", 0)]
            addresses = [workers[0].address]
            return [*workers, self._new_router(addresses)]
        up = self._settings["up"]
        store = []
        if self._settings["router"].handoff != "direct":
            ports = free_ports(3)
            store = [
                kvstore_spec(
                    self._settings, ports=(ports[0], ports[1], ports[2]), redis=self._redis_url
                )
            ]
        workers = [self._new_worker("prefill", i) for i in range(up.prefill)]
        workers += [self._new_worker("decode", i) for i in range(up.decode)]
        return [*store, *workers, self._new_router([])]

    def _new_worker(self, role: str, index: int) -> ProcessSpec:
        up, planner = self._settings["up"], self._settings["planner"]
        engines = 1 if self._aggregated else up.prefill + up.decode
        if planner.autoscale:
            engines = max(engines, planner.worker_budget)
        name = f"{role}-{index}"
        self._gpus[name] = _first_free(self._gpus.values())
        ports = free_ports(2)
        return worker_spec(
            self._settings,
            self._machine,
            role=role,
            index=index,
            gpu=self._gpus[name],
            num_engines=engines,
            ports=(ports[0], ports[1]),
            redis=self._redis_url,
            ticket_keys=self._ticket_keys,
        )

    def _new_router(self, addresses: list[str]) -> ProcessSpec:
        router, free = self._settings["router"], free_ports(2)
        return router_spec(
            self._settings,
            ports=(router.grpc_port or free[0], router.admin_port or free[1]),
            redis=self._redis_url,
            ticket_keys=self._ticket_keys,
            workers=addresses,
            supervisor=str(self._control),
        )

    def _start_redis(self) -> None:
        if self._redis_url is None:
            self._redis = EmbeddedRedis()
            # Here, not in a helper thread: the server ends with the thread that started it.
            self._redis_url = self._redis.start()
            self._say("directory: ready")
            self._watchers["directory"] = asyncio.create_task(self._watch_redis(self._redis))

    async def _watch_redis(self, redis: EmbeddedRedis) -> None:
        """Start the directory again, empty, when it ends unasked: all register again."""
        while True:
            await asyncio.sleep(_REDIS_POLL_S)
            if redis.process is not None and redis.process.poll() is not None:
                self._say(f"directory: ended with code {redis.process.returncode}; again")
                try:
                    redis.start()
                    self._say("directory: ready")
                except DiptychError as error:
                    self._say(f"directory: {error.message}")

    async def _spawn(self, spec: ProcessSpec) -> None:
        child = Child(spec, self._log_directory)
        self._children[spec.name] = child
        await child.start()

    async def _wait_first_ready(self, name: str) -> None:
        timeout_s = self._settings["up"].ready_timeout_s
        await self._children[name].wait_ready(timeout_s, self._tell_once)
        self._say(f"{name}: ready")

    async def _wait_ready_again(self, name: str) -> None:
        """As at first, but a process that is not ready ends nothing."""
        try:
            await self._wait_first_ready(name)
        except UnavailableError:
            pass  # it has ended: whoever watches it says so
        except DeadlineError as error:
            self._say(error.message)

    def _tell_once(self, reason: str) -> None:
        """What several processes wait for is told once."""
        silent = silent_service(reason)
        if silent not in self._told:
            self._told.add(silent)
            self._say(f"waiting: {reason}")

    async def _watch(self, name: str, *, is_ready: bool = False) -> None:
        """Start the process again when it ends unasked, ever more slowly."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started = asyncio.get_running_loop().time()
            code = await self._wait_end(name, is_ready)
            is_ready = False
            if name in self._stopping:
                return
            if asyncio.get_running_loop().time() - started > _MOST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            self._say(f"{name}: ended with code {code}; again in {backoff_s:.0f} s")
            await self._children[name].stop(0.0)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)
            try:
                await self._children[name].start()
            except OSError as error:  # no memory, no disk: the next round tries again
                self._say(f"{name}: cannot be started: {error}")

    async def _wait_end(self, name: str, is_ready: bool) -> int:
        """Its exit code; meanwhile it is told once it is ready, if it was not before."""
        if is_ready:
            return await self._children[name].wait()
        ready = asyncio.create_task(self._wait_ready_again(name), name=f"{name} ready")
        try:
            return await self._children[name].wait()
        finally:
            await end_task(ready)

    async def _drain(self, name: str) -> None:
        child = self._children[name]
        await child.stop(self._settings["worker"].drain_s + self._settings["up"].stop_timeout_s)
        self._children.pop(name, None)
        self._gpus.pop(name, None)
        self._watchers.pop(name).cancel()
        self._stopping.discard(name)

    def _pool(self, pool: str) -> list[str]:
        names = [n for n in self._children if n.startswith(pool + "-") and n not in self._stopping]
        return sorted(names, key=lambda name: int(name.rsplit("-", 1)[1]))

    def _free_index(self, pool: str) -> int:
        taken = {int(n.rsplit("-", 1)[1]) for n in self._children if n.startswith(pool + "-")}
        return _first_free(taken)

    def _write_ticket_keys(self) -> None:
        path = Path(self._ticket_keys)
        path.touch(mode=0o600)
        path.write_text(f"k1:{secrets.token_hex(32)}\n")


def _first_free(taken: Collection[int]) -> int:
    return next(i for i in range(len(taken) + 1) if i not in taken)


def _stop_order(children: Mapping[str, Child]) -> list[list[Child]]:
    """The router, then the workers, then the store."""
    groups: tuple[list[Child], ...] = ([], [], [])
    for name, child in children.items():
        groups[{"router": 0, "kvstore": 2}.get(name, 1)].append(child)
    return list(groups)
