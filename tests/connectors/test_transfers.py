"""The thread that moves pages, between transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from diptych.clock import SystemClock
from diptych.connectors import transfers
from diptych.connectors.page_orders import LoadOrder, SaveOrder
from diptych.connectors.pages import PageObject
from diptych.connectors.transfer_jobs import Load, Save, TransferLimits
from diptych.connectors.transfers import Transfers
from diptych.engine.request import KVObject
from diptych.errors import TransferError


class Copier:
    """Remembers which pools it may reach."""

    token_bytes = 1
    reached: Sequence[memoryview] = ()

    def reach(self, pools: Sequence[memoryview]) -> None:
        self.reached = list(pools)


class Nodes:
    """A store without objects, whose nodes come and go."""

    def __init__(self) -> None:
        self.mapped = [memoryview(b"first"), memoryview(b"second")]
        self.is_lost = False

    def open(self) -> Nodes:
        if self.is_lost:
            raise TransferError("nobody is there")
        return self

    def pools(self) -> list[memoryview]:
        if self.is_lost:
            raise TransferError("nobody is there")
        return list(self.mapped)

    def close(self) -> None:
        return


def test_the_end_of_a_save_is_told_though_the_store_is_lost() -> None:
    """Whoever waits for it holds blocks meanwhile."""
    nodes = Nodes()
    nodes.is_lost = True
    moving = Transfers("test", nodes.open, Copier(), TransferLimits(), SystemClock())  # type: ignore[arg-type]
    order = SaveOrder("r", 0, "", 0, [PageObject(b"tail", 64, 70)], [1], True, False, told=True)
    sending = moving.sending("r")
    page = np.zeros(6, np.uint8)
    moving.save(Save(order, {b"tail": page}, None, time.monotonic() + 60, sending, page.nbytes))
    moving.close()
    output = moving.take_output()
    assert output.saved == {"r"}
    assert not output.empty
    assert not output.finished_sending
    assert not moving.staged_bytes


class SlowNodes(Nodes):
    """It takes its time, and then has nothing."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self._now = now

    def get_many(self, items: Sequence[tuple[bytes, int]], sink: object) -> list[int | None]:
        self._now[0] += 8.0
        return [None] * len(items)


class SteppedClock(SystemClock):
    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self._now = now

    def monotonic(self) -> float:
        return self._now[0]


def test_a_load_that_failed_says_how_long_that_took_and_for_how_much() -> None:
    """Else a store that answers late and in vain would count as fast as it was."""
    now = [100.0]
    nodes = SlowNodes(now)
    moving = Transfers("test", nodes.open, Copier(), TransferLimits(), SteppedClock(now))  # type: ignore[arg-type]
    page = KVObject(key=b"k", start_token=0, end_token=64, checksum=0, num_bytes=640)
    moving.load(Load(LoadOrder("r", 0, 64, [page], [1]), 200.0, 0))
    until(lambda: not moving._live_loads)
    output = moving.take_output()
    assert output.failed_recving == {"r": 0}
    assert output.rates is not None
    assert (output.rates.failed_bytes, output.rates.failed_s) == (640, 8.0)
    assert not output.rates.loaded_bytes
    moving.close()


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_the_pool_of_a_node_that_is_gone_is_let_go_without_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is registered for a GPU stays mapped, and the node's memory with it."""
    monkeypatch.setattr(transfers, "_LOOK_S", 0.01)
    copier, nodes = Copier(), Nodes()
    moving = Transfers("test", nodes.open, copier, TransferLimits(), SystemClock())  # type: ignore[arg-type]
    order = LoadOrder("r", 0, 0, [], [])
    moving.load(Load(order, time.monotonic() + 60, 0))
    until(lambda: len(copier.reached) == 2)
    gone = nodes.mapped.pop()
    until(lambda: len(copier.reached) == 1)
    assert gone not in copier.reached
    nodes.is_lost = True
    time.sleep(0.05)  # an error there ends no thread
    nodes.is_lost, nodes.mapped = False, []
    until(lambda: not copier.reached)
    moving.close()
    assert not moving._thread.is_alive()
