"""Keep the repository root off sys.path, so `kernels` and `proto` never name our folders."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUM_LOGS, LOG_LINES = 12, 60
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"  # for the service processes that tests start
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
