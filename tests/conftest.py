"""Keep the repository root off sys.path, so `kernels` and `proto` never name our folders."""

import contextlib
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.launcher import child

NUM_LOGS, LOG_LINES = 12, 60
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"  # for the service processes that tests start
# UCX tells peers every address that the host has when it starts. One that goes away meanwhile, with
# a network namespace of another test, costs the connection or ends the process (docs/transfers.md).
os.environ.setdefault("UCX_NET_DEVICES", "lo")
if not list(Path("/dev").glob("nvidia[0-9]*")):
    # read when triton is first imported, which a test of something else may do
    os.environ["TRITON_INTERPRET"] = "1"


with contextlib.suppress(ImportError):  # where only the tests of GPUs run
    from hypothesis import HealthCheck, settings

    # an example may take long where others have the cores
    settings.register_profile(
        "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


def pytest_configure() -> None:
    """Ports are given once: a process that starts slowly finds its own still free."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    child.free_ports = own_ports(range(12_000 + int(name[2:]), 32_000, count))


def own_ports(mine: range) -> Callable[[int], list[int]]:
    """As `diptych.launcher.child.free_ports`, of some, and none again before all were given."""
    ports = random.SystemRandom().sample(mine, len(mine))

    def free_ports(count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            port = ports.pop(0)
            ports.append(port)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                found.append(port)
        return found

    return free_ports


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """A test that fails shows the end of every log that its processes wrote."""
    report = yield
    if report.failed:
        factory = item.config._tmp_path_factory  # type: ignore[attr-defined]
        for log in latest_logs(factory.getbasetemp()):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"the end of {log.name}", "\n".join(lines)))
    return report


def latest_logs(directory: Path) -> list[Path]:
    """Logs below a directory, those written last at the end."""
    found = [path for name in ("log", "*.log") for path in directory.rglob(name) if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime)[-NUM_LOGS:]
