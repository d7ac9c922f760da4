import importlib.metadata
import importlib.util
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import diptych
from diptych.cli import main
from diptych.doctor import examine
from diptych.doctor_checks import (
    Finding,
    Level,
    Options,
    check_kernel_cache,
    check_nvlink,
    check_ports,
    check_redis,
    check_versions,
)
from diptych.doctor_transfers import check_nixl

TWO_GPUS = """\
        GPU0    GPU1    CPU Affinity
GPU0     X      {link}    0-31
GPU1    {link}     X      0-31
"""


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in findings}


def test_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ports", "--json", "--host", "127.0.0.1", "--no-transfers"]) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "memlock", "/dev/shm", "memfd", "nvlink", "redis"} <= names
    assert {"UCX_TLS", "nixl", "address", "open files"} <= names


def test_every_transport_is_tested_between_processes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--ports", "--host", "127.0.0.1"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    tested = {line[1]: line[0] for line in lines if "checksums" in line}
    assert {"shm", "tcp", "grpc"} <= tested.keys()
    assert set(tested.values()) == {"ok"}


def test_what_will_not_work_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--ports", port, "--host", "127.0.0.1", "--no-transfers"]
        assert main(["doctor", *flags, "--redis", "redis://127.0.0.1:1"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["port", "address", "redis"][::2]
    assert "in use" in failed[0]


@pytest.mark.parametrize(
    ("link", "level", "words"), [("NV18", Level.OK, "NV18"), ("SYS ", Level.WARN, "PCIe")]
)
def test_nvlink_is_read_from_the_topology(
    link: str, level: Level, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{TWO_GPUS.format(link=link)}E\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    [finding] = check_nvlink(Options())
    assert finding.level is level
    assert words in finding.text


def test_ucx_without_tcp_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,cuda_ipc")
    [finding] = check_nixl(Options())
    assert (finding.name, finding.level) == ("UCX_TLS", Level.FAIL)


def test_a_kernel_cache_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nowhere")
    [finding] = check_kernel_cache(Options())
    assert finding.level is Level.WARN


def test_without_triton_a_cpu_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [triton] = [f for f in check_versions(Options()) if f.name == "triton"]
    [cache] = check_kernel_cache(Options())
    assert "those on a CPU do not" in triton.text
    assert (cache.name, cache.level) == ("kernel cache", Level.OK)
    assert "without triton" in cache.text


def test_a_bad_redis_url_is_named() -> None:
    [finding] = check_redis(Options(redis="http://somewhere"))
    assert finding.level is Level.FAIL
    assert "bad Redis URL" in finding.text


def test_a_check_that_breaks_is_a_finding() -> None:
    def check_the_moon(options: Options) -> list[Finding]:
        raise RuntimeError("it is cloudy")

    assert examine(Options(), [check_the_moon]) == [
        Finding("the moon", Level.WARN, "could not be checked: it is cloudy")
    ]


@pytest.mark.parametrize(
    ("answers", "level"),
    [
        ({"/v1/models": '{"data": [{"owned_by": "diptych"}]}'}, Level.OK),
        ({"/version": f'{{"version": "{diptych.__version__}"}}'}, Level.OK),
        ({"/v1/models": '{"data": [{"owned_by": "vllm"}]}'}, Level.FAIL),
        ({}, Level.FAIL),
    ],
    ids=["a router", "a router with keys", "another server", "no API"],
)
def test_a_port_that_a_running_diptych_has_is_no_problem(
    answers: dict[str, str], level: Level
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path, "").encode()
            self.send_response(200 if body else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        found = levels(list(check_ports(Options(host="127.0.0.1", ports=(port,)))))
        server.shutdown()
    assert found[f"port {port}"] is level


def test_ports_that_are_free_are_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = levels(list(check_ports(Options(host="127.0.0.1", ports=(port,)))))
    assert found == {f"port {port}": Level.OK, "address": Level.OK}
