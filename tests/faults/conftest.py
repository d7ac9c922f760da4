"""One system for all tests of faults: each test leaves it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.deployment import Deployment, Shape, deployed


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A prefill and two decode workers, a store node with a disk, two routers, a Valkey."""
    with deployed(tmp_path_factory.mktemp("faults"), Shape()) as made:
        yield made


@pytest.fixture
def system(shared: Deployment) -> Iterator[Deployment]:
    """The shared system; after the test it is restored, and nothing may have leaked."""
    yield from restored(shared)


@pytest.fixture(scope="session")
def shared_direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two prefill workers; KV goes from worker to worker."""
    shape = Shape(prefill=2, handoff="direct")
    with deployed(tmp_path_factory.mktemp("direct"), shape) as made:
        yield made


@pytest.fixture
def direct(shared_direct: Deployment) -> Iterator[Deployment]:
    """As `system`."""
    yield from restored(shared_direct)


def restored(shared: Deployment) -> Iterator[Deployment]:
    """The system, whole before and after the test."""
    shared.wait_handing_over()
    yield shared
    shared.restore()
    shared.check_nothing_leaks()
