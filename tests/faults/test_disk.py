"""A disk that is full: the store goes on in memory, no answer changes, and room is used again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import until
from tests.faults.clients import QUESTIONS
from tests.faults.deployment import Deployment, Shape

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

DISK_BYTES = 256 << 10


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own, with room for a few objects."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def cramped(small_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A system with its store's files there."""
    shape = Shape(decode=1, routers=1, ssd_path=small_disk)
    made = Deployment(tmp_path_factory.mktemp("cramped"), shape)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_a_full_disk_changes_no_answer_and_is_used_again(
    cramped: Deployment, small_disk: Path
) -> None:
    store = cramped.services["kvstore-0"]

    def full() -> bool:
        for question in QUESTIONS:
            cramped.check_right(question)
        return store.metric("diptych:kvstore_disk_write_errors_total") > 0

    until(full, "the disk is full")
    left = list(small_disk.glob("*/.*"))
    assert not left, "what could not be written whole is removed"
    cramped.check_nothing_leaks()

    def written() -> bool:
        before = store.metric("diptych:kvstore_disk_written_bytes_total")
        cramped.check_right(QUESTIONS[0])
        return store.metric("diptych:kvstore_disk_written_bytes_total") > before

    until(written, "a disk with room again is written to")
