"""What the log says at the end of hand-offs by way of the store."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import xxhash

from diptych.connectors.page_times import PageTimes
from diptych.connectors.shared_storage import FileStore
from diptych.connectors.xxh3 import xxh3_64
from tests.connectors.engines import PROMPT, Engine, running
from tests.connectors.fakes import consumer, producer


def test_both_sides_of_a_hand_off_tell_their_stages_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = Engine(FileStore(tmp_path), seed=1), Engine(FileStore(tmp_path))
    with running(prefill, decode):
        decode.load(consumer("r", PROMPT, prefill.send(producer("r", PROMPT))))
    prefill.worker.shutdown()
    told = [record.message for record in caplog.records if "hand-offs, medians" in record.message]
    assert len(told) == 2
    for stage in ("computed to begun", "begun to stored", "stored to told"):
        assert stage in told[0]
    for stage in ("told to ordered", "ordered to begun", "begun to read", "valid to taken in"):
        assert stage in told[1]


def test_without_a_hand_off_there_is_nothing_to_tell() -> None:
    assert PageTimes().lines() == []


def test_a_checksum_is_computed_while_other_threads_run() -> None:
    """Threads that hash must not wait for each other: the interpreter is free meanwhile."""
    data = memoryview(bytearray(256 << 20))

    def turns() -> int:
        """Of this thread, while another one hashes; few, too, on a machine that is busy."""
        hashing = threading.Thread(target=xxh3_64, args=(data,))
        count = 0
        hashing.start()
        while hashing.is_alive():
            count += 1
            time.sleep(0)
        hashing.join()
        return count

    assert any(turns() > 20 for _ in range(20))
    assert xxh3_64(b"abc" * 100) == xxhash.xxh3_64_intdigest(b"abc" * 100)
