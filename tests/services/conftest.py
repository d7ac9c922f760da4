"""One event loop for the tests that use gRPC servers in this process: gRPC delivers the last events
of a server after its end, and they must not find their loop closed."""

from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps the loop of the first test that asks for it until the last test."""
    yield  # noqa: PT022 (only a fixture that yields keeps its loop)
