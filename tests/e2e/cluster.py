"""Diptych services as real processes with explicit ports, and the figures they show."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from diptych.launcher.child import free_ports

READY_S = 300.0


def free_port() -> int:
    return free_ports(1)[0]


def until(holds: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of one process at one time."""

    samples: list[Sample]

    def sum(self, name: str, **labels: str) -> float:
        """Of a metric's samples that carry `labels`."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@dataclass
class ServiceProcess:
    """One `diptych` command with a configuration file, its log and its ports."""

    command: str
    sections: dict[str, dict[str, Any]]
    directory: Path
    admin_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    prefix: tuple[str, ...] = ()  # a command that runs it elsewhere
    host: str = "127.0.0.1"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> Path:
        """Where its fault points are armed (`diptych.fault_points`)."""
        return self.directory / f"{self.command}-{self.admin_port}.points"

    def arm(self, point: str) -> None:
        """Let it pause when it next gets there."""
        (self.points / point).touch()

    def is_at(self, point: str) -> bool:
        """Whether it pauses there now."""
        return (self.points / f"{point}.at").exists()

    def go_on(self) -> None:
        """Disarm every point, and let it go on where it pauses."""
        for file in self.points.iterdir():
            file.unlink(missing_ok=True)

    @property
    def pids(self) -> list[int]:
        """The service's process and its engine's."""
        assert self.process is not None
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]

    def signal_all(self, number: signal.Signals) -> None:
        """A signal to the service and its engine."""
        for pid in self.pids:
            os.kill(pid, number)

    def start(self) -> None:
        self.points.mkdir(exist_ok=True)
        self.go_on()
        config = self.directory / f"{self.command}-{self.admin_port}.yaml"
        config.write_text(yaml.safe_dump(self.sections))
        self.log = config.with_suffix(".log")
        python = (sys.executable, "-P", "-m", "diptych.cli")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *python, self.command, "--config", str(config)],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **self.environment,
                    "OMP_NUM_THREADS": "1",
                    "DIPTYCH_FAULT_POINTS": str(self.points),
                },
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"{self.command}:\n{self.log.read_text()}"
            try:
                with urllib.request.urlopen(self._url("/readyz"), timeout=10):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"{self.command} is not ready:\n{self.log.read_text()}")

    def figures(self) -> Figures:
        """Its metrics as they are now."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return Figures([sample for family in families for sample in family.samples])

    def metric(self, name: str, **labels: str) -> float:
        """As `Figures.sum`, of now."""
        return self.figures().sum(name, **labels)

    def prompt_tokens(self, source: str) -> float:
        return self.metric("vllm:prompt_tokens_by_source_total", source=source)

    @property
    def all_blocks_free(self) -> bool:
        figures = self.figures()
        return figures.sum("diptych:kv_blocks_free") == figures.sum("diptych:kv_blocks_total") > 0

    def kill(self) -> None:
        """End it without a word."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 90.0) -> int:
        """SIGTERM; its exit code, after SIGKILL if it takes too long."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.command} hangs:\n{self.log.read_text()}") from None

    def _url(self, path: str) -> str:
        return f"http://{self.host}:{self.admin_port}{path}"


class Cluster:
    """Services of one model in one directory; all end with the block that started them.

    `redis` is the section that stores and workers started from then on find one another by. After
    `silence_s` routers take a worker for lost: long, for one may get no time to run.
    """

    def __init__(self, model: str | Path, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self.services: list[ServiceProcess] = []
        self.redis: dict[str, Any] | None = None
        self.silence_s = 60.0

    def kvstore(self, **settings: Any) -> tuple[ServiceProcess, str]:
        """A store node and its address."""
        port = free_port()
        section = {"port": port, "stream_port": free_port(), "pool_bytes": 64 << 20, **settings}
        return self._start("kvstore", {"kvstore": section}), f"127.0.0.1:{port}"

    def worker(
        self,
        role: str,
        *,
        store: str | None = None,
        worker: dict[str, Any] | None = None,
        **engine: Any,
    ) -> tuple[ServiceProcess, str]:
        """A worker (prefill, decode or worker, which is aggregated) and its address. `worker` has
        settings of its section, `engine` those of the engine's. KV goes through the store unless
        they say otherwise."""
        port = free_port()
        named = {"port": port, "worker_id": f"{role}-{port}", "handoff": "store"}
        section: dict[str, Any] = {**named, **(worker or {})}
        if store is not None:
            section["kvstore"] = store
        sections = {"worker": section, "engine": self._engine(**engine)}
        return self._start(role, sections), f"127.0.0.1:{port}"

    def router(self, *workers: str, **settings: Any) -> tuple[ServiceProcess, Api]:
        """A router over these workers and its API."""
        port = free_port()
        section = {"port": port, "workers": list(workers), "handoff": "store", **settings}
        sections = {"router": section, "engine": self._engine()}
        return self._start("router", sections), Api(port)

    def wait_ready(self) -> None:
        for service in self.services:
            service.wait_ready()

    def _engine(self, **more: Any) -> dict[str, Any]:
        return {
            "model": str(self._model),
            "served_model_name": "tiny",
            "device": "cpu",
            "num_threads": 1,
            "num_kv_blocks": 256,
            **more,
        }

    def _start(self, command: str, sections: dict[str, dict[str, Any]]) -> ServiceProcess:
        admin_port = free_port()
        own = "worker" if "worker" in sections else command
        sections[own]["admin_port"] = admin_port
        if command == "router":
            sections["redis"] = {"liveness_s": self.silence_s}
        elif self.redis is not None:
            sections["redis"] = self.redis
        service = ServiceProcess(command, sections, self._directory, admin_port)
        service.start()
        self.services.append(service)
        return service


@contextmanager
def cluster(model: str | Path, directory: Path) -> Iterator[Cluster]:
    """An empty cluster; whatever was started in it is stopped, by force if need be."""
    made = Cluster(model, directory)
    try:
        yield made
    finally:
        for service in made.services:
            if service.process is not None and service.process.poll() is None:
                service.process.send_signal(signal.SIGTERM)
        for service in made.services:
            if service.process is not None:
                try:
                    service.process.wait(30)
                except subprocess.TimeoutExpired:
                    service.kill()


class Api:
    """The OpenAI API of one router, by hand."""

    def __init__(self, port: int) -> None:
        self.port = port

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{error.code}: {error.read().decode()}") from None

    @contextmanager
    def streaming(self, prompt: str | list[int], **fields: Any) -> Iterator[Iterator[str]]:
        """Events of a streamed completion; leaving the block closes the connection."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "stream": True, **fields}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=300) as connection:
            connection.sendall(head.encode() + body)
            with connection.makefile("r", encoding="utf-8") as lines:
                events = (line[6:].strip() for line in lines if line.startswith("data: "))
                yield takewhile(lambda event: event != "[DONE]", events)


class Asking:
    """A client that streams one answer, in a thread of its own."""

    def __init__(self, api: Api, prompt: str | list[int], **fields: Any) -> None:
        self.pieces: list[str] = []
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(api, prompt, fields))
        self._thread.start()

    def _run(self, api: Api, prompt: str | list[int], fields: dict[str, Any]) -> None:
        with api.streaming(prompt, **fields) as events:
            for event in map(json.loads, events):
                if "error" in event:
                    self.problems.append(str(event["error"]))
                self.pieces += [choice["text"] for choice in event.get("choices", [])]

    def text(self, limit_s: float) -> str:
        """The whole answer."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive()
        assert not self.problems
        return "".join(self.pieces)
