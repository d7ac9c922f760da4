"""`diptych up` and `diptych serve`, as a newcomer runs them: the real model, real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych.launcher.child import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
READY_S = 300.0


def free_port() -> int:
    return free_ports(1)[0]


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
        return urllib.request.urlopen(request, timeout=120)

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
                with urllib.request.urlopen(self.url + "/readyz", timeout=2):
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(tmp_path: Path, *argv: str) -> Iterator[Running]:
    port = free_port()
    log = tmp_path / "log"
    command = [sys.executable, "-P", "-m", "diptych.cli", *argv, "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        server = Running(process, port, log)
        server.wait_ready()
        yield server
    finally:
        process.kill() if process.poll() is None else None
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_up_answers_paris_and_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    with running(tmp_path, "up") as server:
        answer = server.chat()
        streamed = server.stream(stream_options={"include_usage": True})
        below = descendants(server.process.pid)
        server.process.send_signal(number)
        code = server.process.wait(timeout=60)

    text = "".join(c["delta"].get("content") or "" for e in streamed for c in e["choices"])
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert text == answer["choices"][0]["message"]["content"]
    assert streamed[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert len(below) >= 7, "router, store, directory, two workers and their engines"
    assert code == 0, server.log.read_text()
    assert not [pid for pid in below if alive(pid)]
    assert set(os.listdir("/dev/shm")) <= shared_before
    assert [p.name for p in tmp_path.iterdir()] == ["log"], "sockets and files are gone"


def test_serve_answers_as_up_does_with_one_engine(tmp_path: Path) -> None:
    with running(tmp_path, "serve", "smollm2", "--served-model-name", "smollm2") as server:
        answer = server.chat(max_tokens=16)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0

    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_port_in_use_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-P", "-m", "diptych.cli", "up", "--port", port],
            capture_output=True,
            text=True,
            timeout=30,
        )

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_told_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", "serve", str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
