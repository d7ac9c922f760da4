"""Keep the repository root off sys.path, so `kernels` and `proto` never name our folders."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"  # for the service processes that tests start
if not list(Path("/dev").glob("nvidia[0-9]*")):
    # read when triton is first imported, which a test of something else may do
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
