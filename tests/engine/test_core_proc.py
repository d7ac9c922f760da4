"""The engine process's loop, run on a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.core_channel import CoreChannel
from diptych.engine.core_messages import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    Stop,
    Submit,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from diptych.engine.core_proc import EngineProcess
from diptych.engine.request import EngineCoreOutputs
from diptych.errors import EngineError
from tests.engine.fake_connector import FakeConnector, FakeTransfers, Served
from tests.engine.fake_executor import FakeExecutor, expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(40))


@dataclass
class Peer:
    socket: socket.socket
    transfers: FakeTransfers
    thread: threading.Thread

    def read(self) -> EngineCoreOutputs:
        prefix = self._exactly(PREFIX_BYTES)
        return decode_from_engine(self._exactly(frame_length(prefix))).outputs

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.socket.recv(count - len(data))
        return data


@contextmanager
def serving() -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    executor, connector = FakeExecutor(), FakeConnector(available=1000)
    transfers = FakeTransfers(executor, connector)
    core = EngineCore(EngineConfig(), Served(executor, transfers), connector)
    channel = CoreChannel(theirs)
    ended = []

    def serve() -> None:
        try:
            EngineProcess(core, channel).run()
        except EOFError:
            ended.append("eof")
        channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Peer(ours, transfers, thread)
    finally:
        ours.close()
        thread.join(120)
    assert not thread.is_alive()


def test_a_load_that_ends_is_noticed_without_a_word_from_outside_and_without_spinning() -> None:
    with serving() as peer:
        peer.socket.sendall(encode_frame(Submit(make_request("a", PROMPT, max_tokens=1))))
        assert peer.read().stats.num_waiting == 1
        time.sleep(0.1)
        assert len(peer.transfers.executor.steps) < 150
        peer.transfers.finish_load("a")
        outputs = peer.read()
        while not outputs.request_ids:
            outputs = peer.read()
        assert outputs.token_ids == expected_output(PROMPT, 1)


def test_a_frame_may_arrive_in_pieces_and_several_at_once() -> None:
    with serving() as peer:
        peer.transfers.connector.available = 0
        frames = [Submit(make_request(i, PROMPT, max_tokens=1)) for i in "abc"]
        data = b"".join(map(encode_frame, frames))
        for at in range(0, len(data), 100):
            peer.socket.sendall(data[at : at + 100])
            time.sleep(0.001)
        seen: list[str] = []
        while len(seen) < 3:
            seen += peer.read().request_ids
    assert sorted(seen) == ["a", "b", "c"]


def test_a_stop_ends_the_loop_while_requests_run() -> None:
    with serving() as peer:
        peer.socket.sendall(encode_frame(Submit(make_request("a", PROMPT))))
        peer.socket.sendall(encode_frame(Stop()))
        peer.thread.join(120)
        assert not peer.thread.is_alive()


def test_a_frame_over_the_limit_is_refused_by_both_ends() -> None:
    with pytest.raises(EngineError, match="over the limit"):
        frame_length((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
