"""`diptych up` and `diptych serve`, as a newcomer runs them: the real model, real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.launched import Running, alive, descendants, process_of, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_up_answers_paris_and_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    with running(tmp_path, "up") as server:
        answer = server.chat()
        streamed = server.stream(stream_options={"include_usage": True})
        below = descendants(server.process.pid)
        server.process.send_signal(number)
        code = server.process.wait(timeout=150)

    text = "".join(c["delta"].get("content") or "" for e in streamed for c in e["choices"])
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert text == answer["choices"][0]["message"]["content"]
    assert streamed[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert len(below) >= 7, "router, store, directory, two workers and their engines"
    assert code == 0, server.log.read_text()
    assert not [pid for pid in below if alive(pid)]
    assert set(os.listdir("/dev/shm")) <= shared_before
    assert [p.name for p in tmp_path.iterdir()] == ["log"], "sockets and files are gone"


def attempts_of(server: Running) -> dict[str, float]:
    """What the router asked of workers, by stage."""
    where = re.search(r"router .* (http\S+/metrics)", server.log.read_text())
    assert where is not None
    with urllib.request.urlopen(where[1], timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [s for f in families for s in f.samples if s.name == "diptych:attempts_total"]
    return {sample.labels["stage"]: sample.value for sample in samples}


@pytest.mark.parametrize("flags", [(), ("--handoff", "direct")], ids=["auto", "direct"])
def test_up_hands_over_from_worker_to_worker_from_the_first_request_on(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    logs = tmp_path / "logs"
    with running(tmp_path, "up", *flags, "--log-dir", str(logs)) as server:
        for _ in range(2):
            answer = server.chat(max_tokens=16)
            assert "Paris" in answer["choices"][0]["message"]["content"]
        attempts = attempts_of(server)
        stores = process_of(server.process.pid, "diptych.cli kvstore")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=150) == 0

    assert bool(stores) is (not flags)
    decode, router = (next(logs.glob(f"{name}*")).read_text() for name in ("decode-0", "router"))
    assert "prefill-0 can be read over shm" in decode
    assert "is lost" not in router
    # `up` waits for the test of the link, though not for ever
    assert attempts == {"pair": 2.0} or "were not tested in time" in router


def test_serve_answers_as_up_does_with_one_engine(tmp_path: Path) -> None:
    with running(tmp_path, "serve", "smollm2", "--served-model-name", "smollm2") as server:
        answer = server.chat(max_tokens=16)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=150) == 0

    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_port_in_use_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-P", "-m", "diptych.cli", "up", "--port", port],
            capture_output=True,
            text=True,
            timeout=150,
        )

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_told_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", "serve", str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr
