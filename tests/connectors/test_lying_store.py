"""A store node that does not keep to the protocol hurts nobody: it alone is left alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from diptych.connectors.sealed_memory import SIZE_SEALS
from diptych.connectors.store_transport import MappedMover
from diptych.errors import TransferError
from tests.connectors.lying_node import MemoryGiver

POOL_BYTES = 1 << 20


@contextmanager
def memory(
    num_bytes: int = POOL_BYTES, *, said_bytes: int = POOL_BYTES, seals: int = SIZE_SEALS
) -> Iterator[str]:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    giver = MemoryGiver(fd, said_bytes)
    try:
        yield giver.address
    finally:
        giver.close()
        os.close(fd)


# --- the mapped pool


def test_memory_that_its_node_could_shrink_is_not_mapped() -> None:
    """An access beyond its end would kill this process."""
    with (
        memory(seals=SIZE_SEALS & ~fcntl.F_SEAL_SHRINK) as address,
        pytest.raises(TransferError, match="not sealed at its size"),
    ):
        MappedMover.connect(address, b"t" * 32, 60.0)


@pytest.mark.parametrize("said_bytes", [POOL_BYTES + 1, 0, 1 << 63], ids=["more", "none", "huge"])
def test_memory_of_another_size_than_the_node_says_is_not_mapped(said_bytes: int) -> None:
    with (
        memory(said_bytes=said_bytes) as address,
        pytest.raises(TransferError, match="not sealed at its size"),
    ):
        MappedMover.connect(address, b"t" * 32, 60.0)


def test_sealed_memory_is_mapped() -> None:
    with memory() as address:
        mover = MappedMover.connect(address, b"t" * 32, 60.0)
        assert [view.nbytes for view in mover.pools()] == [POOL_BYTES]
        mover.close()
