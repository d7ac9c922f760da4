"""What `diptych doctor` asks of transfers: NIXL, UCX, and each transport between two processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from diptych.config import MIB
from diptych.connectors.transports.base import Endpoint
from diptych.connectors.transports.choose import NAMES, TransportSettings, open_transports
from diptych.connectors.transports.links import LinkState
from diptych.connectors.transports.memory import fresh_memory
from diptych.connectors.transports.nixl import check_ucx_tls, installed, load_nixl
from diptych.connectors.transports.orders import LinkReport
from diptych.connectors.transports.thread import TransferThread
from diptych.doctor_checks import Finding, Level, Options
from diptych.errors import ConfigError, DiptychError

_TEST_S = 20.0
_POOL_BYTES = 8 * MIB


def check_nixl(options: Options) -> Iterator[Finding]:
    try:
        check_ucx_tls(os.environ)
    except ConfigError as error:
        yield Finding("UCX_TLS", Level.FAIL, error.message)
        return
    yield Finding("UCX_TLS", Level.OK, os.environ.get("UCX_TLS") or "not set: all that UCX has")
    if installed() is None:
        level = Level.WARN if _has_gpu() else Level.OK
        yield Finding("nixl", level, "not installed: pip install 'diptych[cu13]' (or [cu12])")
        return
    _, version = load_nixl()
    yield Finding("nixl", Level.OK, f"{version} ({installed()})")


def check_transports(options: Options) -> Iterator[Finding]:
    """Each that is there, from another process of this machine into this one."""
    if not options.transfers:
        return
    devices = ["cuda:0", "cuda:1"] if _num_gpus() > 1 else ["cuda:0"] * 2 if _has_gpu() else []
    for name in NAMES:
        if name == "nixl" and installed() is None:
            continue
        if name != "cuda_ipc":
            yield _tested(name, "cpu", "cpu")
        if devices and name in ("cuda_ipc", "nixl"):
            yield _tested(name, *devices)


def _tested(name: str, source: str, target: str) -> Finding:
    from diptych.bench.transport_pool import running_source

    label = f"{name} {source} to {target}" if source != "cpu" else name
    try:
        with running_source(name, source, _POOL_BYTES) as endpoint:
            report = _report(name, target, endpoint)
    except DiptychError as error:
        return Finding(label, Level.WARN, error.message)
    if report.state is not LinkState.READY:
        return Finding(label, Level.WARN, "; ".join(report.failures.values()))
    return Finding(label, Level.OK, f"{report.bandwidth_gb_per_s:.1f} GB/s, checksums right")


def _report(name: str, device: str, endpoint: Endpoint) -> LinkReport:
    memory = fresh_memory(device, _POOL_BYTES)
    settings = TransportSettings(device=device)
    thread = TransferThread(open_transports([name], settings), memory, "doctor")
    thread.start()
    try:
        thread.connect("source", endpoint)
        end_s = time.monotonic() + _TEST_S
        while time.monotonic() < end_s:
            report = thread.links().get("source")
            if report is not None and report.state is not LinkState.TESTING:
                return report
            time.sleep(1e-3)
    finally:
        thread.close()
    return LinkReport("source", LinkState.DOWN, name, 0.0, {name: "the test did not end"})


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _has_gpu() -> bool:
    return _num_gpus() > 0


CHECKS = (check_nixl, check_transports)
