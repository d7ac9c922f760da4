"""What keeps a command from starting is one clear line, an exit code, and nothing left running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(900)

MARK = "STARTED_BY_TEST"


def fails(*argv: str) -> str:
    """The last line of a command that must end by itself, with code 1 and nothing left running."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", *argv],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    deadline = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)
    return done.stderr.strip().splitlines()[-1].strip()


def marked(mark: str) -> list[int]:
    """Live processes whose environment holds the mark."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bad-start") / "model")


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *[("router", flag) for flag in ("--port", "--grpc-port", "--admin-port")],
        *[("decode", flag) for flag in ("--port", "--admin-port")],
        *[("kvstore", flag) for flag in ("--port", "--stream-port", "--admin-port")],
        *[("up", flag) for flag in ("--port", "--grpc-port", "--admin-port")],
    ],
)
def test_a_port_in_use_is_named(model: Path, taken: str, command: str, flag: str) -> None:
    argv = [command, flag, taken]
    if command != "kvstore":
        argv += ["--model", str(model)]
    if command == "router":
        argv += ["--workers", "127.0.0.1:1"] + (["--port", "0"] if flag != "--port" else [])
    if command == "up" and flag != "--port":
        argv += ["--port", "0"]

    line = fails(*argv)

    assert f"cannot listen on 127.0.0.1:{taken}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["up", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["kvstore", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["kvstore", "--pool-bytes", "900000GiB"], "cannot make a pool"),
        (["kvstore", "--redis", "http://x"], "bad Redis URL http://x"),
        (["router", "--port", "0"], "no Redis is configured"),
        (["decode"], "needs --kvstore or --redis"),
        (["router", "--port", "70000"], "port must be 0 to 65535"),
        (["serve", ""], "model must not be empty"),
        (["serve", "/no/such/place"], "model '/no/such/place' is not known"),
        (["serve", "/no/such.gguf"], "/no/such.gguf cannot be read"),
        (["serve", "smollm2", "--port", "0", "--log-dir", "/proc/none"], "logs cannot be kept in"),
        (["router", "--config", "/no/such.yaml"], "/no/such.yaml cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_that_cannot_work_is_named(argv: list[str], text: str, model: Path) -> None:
    if argv[0] in ("decode", "router"):
        argv = [*argv, "--model", str(model)]
    argv = [str(model) if value == "smollm2" else value for value in argv]

    assert text in fails(*argv)


@pytest.mark.slow
def test_a_model_that_the_engine_cannot_load_stops_all_of_it(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50_000])

    for command in ("serve", "up"):
        line = fails(command, "--model", str(model), "--port", "0")
        assert f"{weights} is missing, truncated or damaged" in line
