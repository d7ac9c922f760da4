"""A whole system as processes that may be hurt: started, restored, and checked for leaks.

Valkey, store nodes with disks, prefill and decode workers, two routers. Leases last 1 to 2 s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from diptych.embedded_redis import EmbeddedRedis
from diptych.launcher.child import free_ports
from diptych.proto import kvstore_pb2, kvstore_pb2_grpc
from tests.e2e.cluster import ServiceProcess, free_port, until
from tests.faults.clients import QUESTIONS, Answer, Question, ask
from tests.faults.counts import Held, child_of, held
from tests.faults.growth import Growth
from tests.faults.pauses import Pause
from tests.faults.proxy import Address, Proxy, listening_ports
from tests.tiny_models import make_tiny_model

SETTLE_S, WARM_S = 90.0, 240.0
WARM_UP_ROUNDS, WARM_UP_AT_ONCE = 3, 12
HEARTBEAT_S, LIVENESS_S = 0.3, 1.5
LEASE_S, PUT_TTL_S = 1.0, 2.0
# Caches that are bounded, but far beyond what a run of minutes fills, are kept small: beside them
# a leak would not be seen. The allocator keeps what was freed, apart for each thread. oneDNN keeps
# a compiled kernel for each number of rows, and torch's layer above it (ideep) keeps it once more.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}
SSD_BYTES = 32 << 20
PROXY_HOST = "127.0.0.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many of each, and how they find the bytes."""

    prefill: int = 1
    decode: int = 2
    stores: int = 1
    routers: int = 2
    handoff: str = "store"
    transport: str = "auto"
    store_host: str = ""  # where a proxy stands for the first store node's stream
    ssd_path: Path | None = None  # of the first store node; in its own folder if absent
    # workers and the directory are reached through proxies (`Deployment.proxies`)
    proxied: bool = False
    transports: dict[str, str] = field(default_factory=dict)  # of workers, by name: kv_transports
    # role: network namespace and address there
    places: dict[str, tuple[str, str]] = field(default_factory=dict)


class Deployment:
    """The system. `services` by name: prefill-0, decode-1, kvstore-0, router-0 and so on."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.directory = directory
        self.shape = shape
        self.redis = EmbeddedRedis()
        self.redis_url = ""
        # proxies of a proxied system: `redis`, each worker (its control port) and `NAME/kv`
        self.proxies: dict[str, list[Proxy]] = {}
        self.services: dict[str, ServiceProcess] = {}
        self.ports: dict[str, int] = {}
        self.stream_ports = free_ports(shape.stores)
        self.store_ports = free_ports(shape.stores)
        self.expected: dict[Question, str] = {}
        self._baseline: dict[int, Held] = {}
        self._growth = Growth()
        self._keys = directory / "ticket-keys"
        self._keys.write_text("k1:" + "5a" * 32 + "\n")
        self._model = make_tiny_model(directory / "model")

    # --- start and end

    def start(self) -> None:
        self.redis_url = self.redis.start()
        if self.shape.proxied:
            path = str(self.directory / "redis.sock")
            self._stand_before("redis", path, self.redis_url.removeprefix("unix://"))
            self.redis_url = f"unix://{path}"
        for index in range(self.shape.stores):
            self._add("kvstore", index, kvstore=self._store_section(index))
        for role in ("prefill", "decode"):
            for index in range(getattr(self.shape, role)):
                worker = {"ticket_keys": str(self._keys), "stream_grace_s": 1.0, "drain_s": 5.0}
                worker["handoff"] = self.shape.handoff
                worker["kv_transports"] = self.shape.transports.get(f"{role}-{index}", "auto")
                self._add(role, index, worker=worker, engine=self._engine(role))
        for index in range(self.shape.routers):
            section = {"handoff": self.shape.handoff, "ticket_keys": str(self._keys)}
            section |= {"first_token_timeout_s": 15.0, "drain_s": 2.0}
            self._add("router", index, router=section, engine=self._engine("router"))
        if self.shape.proxied:
            self._proxy_workers()
        self.restore()
        self.expected = {question: self._first_answer(question) for question in QUESTIONS}

    def stop(self) -> None:
        for service in self.services.values():
            if service.process is not None and service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
                service.process.send_signal(signal.SIGTERM)
        for service in self.services.values():
            if service.process is not None:
                with contextlib.suppress(Exception):
                    service.process.wait(30)
                service.kill()
        self.redis.stop()
        for proxy in self.all_proxies():
            proxy.close()

    # --- parts

    def of_role(self, role: str) -> dict[str, ServiceProcess]:
        return {n: s for n, s in self.services.items() if n.startswith(role)}

    def workers(self) -> list[str]:
        """Their names."""
        return [name for name in self.services if name.startswith(("prefill", "decode"))]

    def holder(self, role: str) -> str:
        """The worker of a role in which a request holds blocks."""

        def holding() -> list[str]:
            return [n for n, each in self.of_role(role).items() if not each.all_blocks_free]

        until(lambda: bool(holding()), f"a {role} worker holds blocks", SETTLE_S)
        return holding()[0]

    def pausing(self, role: str, point: str) -> Pause:
        """Pause whichever process of a role (or name) first reaches a point."""
        return Pause({name: each.points for name, each in self.of_role(role).items()}, point)

    def pid(self, name: str) -> int:
        """Of a service; `NAME/engine` is that of a worker's engine, `redis` the directory's."""
        if name == "redis":
            assert self.redis.process is not None
            return self.redis.process.pid
        service, _, part = name.partition("/")
        process = self.services[service].process
        assert process is not None
        return child_of(process.pid) if part else process.pid

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal to a process. One that kills is waited for."""
        if name == "redis" and number is signal.SIGKILL:
            self.redis.kill()
            return
        os.kill(self.pid(name), number)
        if number is signal.SIGKILL:
            process = self.services[name.partition("/")[0]].process
            assert process is not None
            process.wait(90)  # of an engine: its worker ends with it

    def flush_redis(self) -> None:
        """The directory forgets everything."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(self.redis.url.removeprefix("unix://"))
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(64).startswith(b"+OK")

    # --- questions

    def ask(self, question: Question, router: int = 0) -> Answer:
        return ask(self.ports[f"router-{router}"], question)

    def check_right(self, question: Question, router: int = 0) -> None:
        answer = self.ask(question, router)
        assert answer.is_right(self.expected[replace(question, salt="")]), answer

    def _first_answer(self, question: Question) -> str:
        answers = [self.ask(question, router) for router in range(self.shape.routers)]
        assert all(a.ended and not a.error for a in answers), answers
        assert len({a.text for a in answers}) == 1
        return answers[0].text

    # --- after a fault

    def revive(self) -> list[ServiceProcess]:
        """Start what has ended and wake what sleeps; returns what was started."""
        self.redis.start()
        started = []
        for service in self.services.values():
            if service.process is not None and service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
            else:
                service.start()
                started.append(service)
        return started

    def restore(self) -> None:
        """Everything runs, is found, is warm, and is known by its counts."""
        self.revive()
        self.wait_whole()
        if set(self._pids().values()) - self._baseline.keys():
            self._warm_up(WARM_UP_ROUNDS)
            self._note_counts()

    def wait_whole(self) -> None:
        """Wait until everything is ready and both routers know all workers."""
        for service in self.services.values():
            service.wait_ready()
        num_workers = self.shape.prefill + self.shape.decode
        for router in self.of_role("router").values():
            until(
                lambda r=router: r.metric("diptych:workers_ready") == num_workers,
                "all workers are connected",
                SETTLE_S,
            )

    def wait_handing_over(self) -> None:
        """Wait until KV goes from prefill to decode: who was lost is left alone for a while."""

        def handed_over() -> bool:
            before = self._num_received()
            self.check_right(QUESTIONS[0])
            return self._num_received() > before

        until(handed_over, "KV is handed over", SETTLE_S)

    def note_anew(self) -> None:
        """What every process holds now is what it holds when nothing is under way."""
        self._baseline.clear()
        self._note_counts()

    def note_memory(self) -> None:
        """Measure all processes; `grown` tells what became of it."""
        self._growth.note(self._pids())

    def check_nothing_leaks(self) -> None:
        """Blocks, leases, pool bytes, descriptors and threads are back to where they were."""
        _until_empty(self.in_use)
        for name in self.of_role("kvstore"):
            until(lambda n=name: self._empties(n), f"the pool of {name} is empty", SETTLE_S)
        back: set[str] = set()

        def not_yet_back() -> dict[str, str]:
            """Each was back at some time: all at once they need not be, where one that gets no
            time to run makes others open a connection anew."""
            found = self.extra()
            back.update(self._pids().keys() - found.keys())
            return {name: more for name, more in found.items() if name not in back}

        _until_empty(not_yet_back)

    def in_use(self) -> dict[str, float]:
        """What is not given back, by name."""
        found: dict[str, float] = {}
        for name, service in self.services.items():
            figures = service.figures()
            if name.startswith("kvstore"):
                for metric in ("leases", "puts_open", "pinned_bytes"):
                    found[f"{name} {metric}"] = figures.sum(f"diptych:kvstore_{metric}")
                continue
            found[f"{name} running"] = figures.sum("vllm:num_requests_running")
            if name.startswith("router"):
                continue
            found[f"{name} waiting"] = figures.sum("vllm:num_requests_waiting")
            free = figures.sum("diptych:kv_blocks_free")
            found[f"{name} blocks"] = figures.sum("diptych:kv_blocks_total") - free
        return {name: value for name, value in found.items() if value}

    def extra(self) -> dict[str, str]:
        """Processes that hold more than when they were warm, and what they hold more of
        (`counts.POOLED_THREADS` says what does not count)."""
        found = {}
        # an engine may need the store for the first time long after the start
        connections = {"tcp in": self.shape.prefill + self.shape.decode}
        for name, pid in self._pids().items():
            before, now = self._baseline.get(pid), held(pid)
            may_have = connections if name.startswith("kvstore") else None
            if before is not None and (more := now.beyond(before, may_have)):
                found[name] = f"{more} more than {before}"
        return found

    def grown(self) -> dict[str, str]:
        """Processes whose memory grew since they were warm."""
        return self._growth.grown(self._pids())

    # --- inside

    def _pids(self) -> dict[str, int]:
        """Of the processes that live."""
        found = {}
        for name in self.services:
            with contextlib.suppress(OSError):
                found[name] = self.pid(name)
                if name.startswith(("prefill", "decode")):
                    found[f"{name}/engine"] = self.pid(f"{name}/engine")
        return found

    def _num_received(self) -> float:
        workers = self.of_role("decode").values()
        return sum(worker.prompt_tokens("external_kv_transfer") for worker in workers)

    def _num_handed(self, name: str) -> float:
        """What a worker has given, in hand-offs, or taken, in tokens."""
        worker = self.services[name]
        if name.startswith("prefill"):
            figures = worker.figures()
            out, given = "diptych:handoffs_out_total", "diptych:handoffs_given_total"
            return figures.sum(out) + figures.sum(given)
        return worker.prompt_tokens("external_kv_transfer")

    def _warm_up(self, num_rounds: int) -> None:
        def one(number: int) -> Answer:
            return self.ask(QUESTIONS[number % len(QUESTIONS)], number % self.shape.routers)

        before = {name: self._num_handed(name) for name in self.workers()}
        with ThreadPoolExecutor(8) as pool:
            for _ in range(num_rounds):
                answers = list(pool.map(one, range(WARM_UP_AT_ONCE)))
                assert all(a.ended for a in answers), answers

            def all_used() -> bool:
                """What a first hand-off opens stays open: it is to be known as what was there."""
                list(pool.map(one, range(WARM_UP_AT_ONCE)))
                return all(self._num_handed(n) > before[n] for n in self.workers())

            until(all_used, "every worker has handed KV over or taken it", WARM_S)
        for name in self.of_role("kvstore"):
            self._empties(name)  # what checks for leaks starts threads, once

    def _note_counts(self) -> None:
        _until_empty(self.in_use)
        known, self._baseline = self._baseline, {}
        for pid in self._pids().values():
            self._baseline[pid] = known.get(pid) or held(pid)

    def _empties(self, name: str) -> bool:
        """Drop all objects of a node; whether its pool then has all its bytes again."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[name]}") as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
            stub.Evict(kvstore_pb2.EvictRequest(all=True), timeout=60)
        return self.services[name].metric("diptych:kvstore_used_bytes") == 0

    def _add(self, command: str, index: int, **sections: dict[str, Any]) -> None:
        name = f"{command}-{index}"
        port = self.store_ports[index] if command == "kvstore" else free_port()
        admin_port = free_port()
        own = sections["worker" if "worker" in sections else command]
        own |= {"port": port, "admin_port": admin_port}
        if "worker" in sections:
            own["worker_id"] = name
            if self.shape.proxied:
                own["advertise_address"] = f"{PROXY_HOST}:{port}"
        sections["redis"] = {
            "redis": self.redis_url,
            "heartbeat_s": HEARTBEAT_S,
            "liveness_s": LIVENESS_S,
        }
        service = ServiceProcess(command, sections, self.directory, admin_port)
        service.environment = ENVIRONMENT
        if command in self.shape.places:
            namespace, address = self.shape.places[command]
            own |= {"host": "0.0.0.0", "advertise_address": f"{address}:{port}"}
            service.prefix, service.host = ("ip", "netns", "exec", namespace), address
        self.services[name] = service
        self.ports[name] = port

    def _proxy_workers(self) -> None:
        """Stand before every worker, and before what prefill workers serve their KV at, before
        anybody tries to read it there."""
        for name in (*self.of_role("prefill"), *self.of_role("decode")):
            port = self.ports[name]
            self._stand_before(name, (PROXY_HOST, port), ("127.0.0.1", port))
        first = self.of_role("kvstore") | self.of_role("prefill")
        for service in first.values():
            service.start()
        for name, service in first.items():
            service.wait_ready()
            if name.startswith("prefill"):
                for port in listening_ports(self.pid(f"{name}/engine")):
                    self._stand_before(f"{name}/kv", (PROXY_HOST, port), ("127.0.0.1", port))

    def _stand_before(self, name: str, listen: Address | str, target: Address | str) -> None:
        proxy = Proxy(listen, target)
        self.proxies.setdefault(name, []).append(proxy)
        proxy.__enter__()

    def all_proxies(self) -> list[Proxy]:
        return [proxy for proxies in self.proxies.values() for proxy in proxies]

    def _store_section(self, index: int) -> dict[str, Any]:
        disk = self.shape.ssd_path if index == 0 else None
        return {
            "stream_port": self.stream_ports[index],
            "advertise_address": self._advertised(index),
            "pool_bytes": 32 << 20,
            "lease_s": LEASE_S,
            "put_ttl_s": PUT_TTL_S,
            "ssd_path": str(disk or self.directory / f"disk-{index}"),
            "ssd_bytes": SSD_BYTES,
            "ssd_min_uses": 1,
        }

    def _advertised(self, index: int) -> str | None:
        if index or not self.shape.store_host:
            return None
        return f"{self.shape.store_host}:{self.store_ports[index]}"

    def _engine(self, role: str) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(self._model),
            "served_model_name": "tiny",
            "device": "cpu",
            "num_threads": 1,
            "num_kv_blocks": 256,
            "max_num_batched_tokens": 64,  # prompts take several chunks
        }
        if self.shape.transport != "auto" and role != "router":
            extra = {"redis": self.redis_url, "heartbeat_s": HEARTBEAT_S}
            extra |= {"liveness_s": LIVENESS_S, "transport": self.shape.transport}
            engine["kv_transfer_config"] = {
                "kv_connector": "StoreConnector",
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_connector_extra_config": extra,
            }
        return engine


def _until_empty(found: Callable[[], dict[str, Any]]) -> None:
    """Wait until nothing is found.

    Raises:
        AssertionError: there still is something; names it.
    """
    deadline = time.monotonic() + SETTLE_S
    while left := found():
        assert time.monotonic() < deadline, f"after {SETTLE_S:g} s there is still {left}"
        time.sleep(0.2)  # what looks takes time from those that are looked at


@contextmanager
def deployed(directory: Path, shape: Shape) -> Iterator[Deployment]:
    """The system, ready and warm; everything of it is ended with the block."""
    made = Deployment(directory, shape)
    try:
        made.start()
        yield made
    finally:
        made.stop()
