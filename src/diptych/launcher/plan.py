"""Which processes one machine runs, as values; nothing is started here."""

from __future__ import annotations

import dataclasses
import glob
import os
from dataclasses import dataclass, field
from typing import Any

from diptych.config_sources import Settings


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One `diptych` process: its command and its configuration file's content."""

    name: str
    command: str
    admin_port: int
    sections: dict[str, dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"  # as it stands in a URL

    @property
    def address(self) -> str:
        """host:port of its gRPC, as this machine reaches it."""
        port = "grpc_port" if self.command == "router" else "port"
        section = self.command if self.command in self.sections else "worker"
        return f"{self.host}:{self.sections[section][port]}"


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share out."""

    num_cores: int
    num_gpus: int

    @classmethod
    def here(cls) -> Machine:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            gpus = len([name for name in visible.split(",") if name not in ("", "-1")])
        else:
            gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        return cls(len(os.sched_getaffinity(0)), gpus)

    def threads_per_engine(self, num_engines: int) -> int:
        """Engines with all cores each slow one another a hundredfold."""
        return max(1, self.num_cores // max(1, num_engines))


def worker_spec(
    settings: Settings,
    machine: Machine,
    *,
    role: str,
    index: int,
    gpu: int,
    num_engines: int,
    ports: tuple[int, int],
    redis: str | None,
    ticket_keys: str,
) -> ProcessSpec:
    """One worker. `ports` are its gRPC and admin port; `gpu` counts workers over all pools."""
    engine = dataclasses.asdict(settings["engine"])
    environment = {}
    if machine.num_gpus and engine["device"] in ("auto", "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = _gpu_name(gpu % machine.num_gpus)
        sharing = -(-num_engines // machine.num_gpus)
        engine["gpu_memory_utilization"] /= sharing
    else:
        threads = engine["num_threads"] or machine.threads_per_engine(num_engines)
        engine["num_threads"] = threads
        environment["OMP_NUM_THREADS"] = str(threads)
    worker = dataclasses.asdict(settings["worker"])
    worker.update(
        port=ports[0],
        admin_port=ports[1],
        ticket_keys=ticket_keys,
        worker_id=f"{role}-{index}",
        handoff=settings["router"].handoff,
        advertise_address=None,
    )
    command = "worker" if role == "aggregated" else role
    return ProcessSpec(
        name=f"{role}-{index}",
        command=command,
        admin_port=ports[1],
        sections={"engine": engine, "worker": worker, "redis": _redis(settings, redis)},
        environment=environment,
        host=url_host(worker["host"]),
    )


def kvstore_spec(
    settings: Settings, *, ports: tuple[int, int, int], redis: str | None
) -> ProcessSpec:
    """The store node. `ports` are its gRPC, byte stream and admin port."""
    kvstore = dataclasses.asdict(settings["kvstore"])
    kvstore.update(port=ports[0], stream_port=ports[1], admin_port=ports[2])
    sections = {"kvstore": kvstore, "redis": _redis(settings, redis)}
    return ProcessSpec("kvstore", "kvstore", ports[2], sections, host=url_host(kvstore["host"]))


def router_spec(
    settings: Settings,
    *,
    ports: tuple[int, int],
    redis: str | None,
    ticket_keys: str,
    workers: list[str],
    supervisor: str,
) -> ProcessSpec:
    """The router. `ports` are its gRPC and admin port; `workers` are static addresses where there
    is no registry."""
    router = dataclasses.asdict(settings["router"])
    # on one machine nobody takes over from the router: Ctrl-C ends at once
    router.update(grpc_port=ports[0], admin_port=ports[1], ticket_keys=ticket_keys, drain_s=0.0)
    if workers:
        router["workers"] = workers
    planner = dataclasses.asdict(settings["planner"])
    planner["supervisor"] = supervisor
    sections = {
        "router": router,
        "engine": dataclasses.asdict(settings["engine"]),
        "planner": planner,
        "redis": _redis(settings, redis),
    }
    host = url_host(router["host"])
    return ProcessSpec("router", "router", ports[1], sections, host=host)


def url_host(host: str) -> str:
    """Where this machine reaches what listens on `host`, as it stands in a URL."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _redis(settings: Settings, url: str | None) -> dict[str, Any]:
    return {**dataclasses.asdict(settings["redis"]), "redis": url}


def _gpu_name(index: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)
