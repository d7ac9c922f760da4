"""`diptych up` and `diptych serve` as processes, what they answer and what runs below them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych.launcher.child import free_ports

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
READY_S = 300.0


class Running:
    """A `diptych` command that serves, its URL, and the processes below it."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=300)

    def chat(self, **extra: Any) -> dict[str, Any]:
        body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, **extra}
        with self.post("/v1/chat/completions", body) as response:
            return dict(json.load(response))

    def stream(self, **extra: Any) -> list[dict[str, Any]]:
        body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "stream": True, **extra}
        with self.post("/v1/chat/completions", body) as response:
            lines = [line.decode().strip() for line in response]
        assert [line for line in lines if line][-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(self.url + "/readyz", timeout=10):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"not ready:\n{self.log.read_text()}")


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def process_of(pid: int, words: str) -> int:
    """The process below `pid` whose command line holds `words`; 0 if there is none."""
    for found in descendants(pid):
        try:
            line = Path(f"/proc/{found}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words in line and alive(found):
            return found
    return 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def launched(directory: Path, *argv: str) -> Iterator[Running]:
    """The command on a free port, as soon as it runs; killed at the end if it still does."""
    port = free_ports(1)[0]
    log = directory / "log"
    command = [sys.executable, "-P", "-m", "diptych.cli", *argv, "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "TMPDIR": str(directory)},
        )
    try:
        yield Running(process, port, log)
    finally:
        below = descendants(process.pid)
        process.kill() if process.poll() is None else None
        process.wait()
        for pid in below:
            # one that a test froze hears only now that its launcher is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def running(directory: Path, *argv: str) -> Iterator[Running]:
    """The command once it is ready."""
    with launched(directory, *argv) as server:
        server.wait_ready()
        yield server
