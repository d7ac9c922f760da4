"""Engines of a tiny model around a store node, driven step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diptych.config import EngineConfig
from diptych.connectors.page_costs import LoadCosts
from diptych.connectors.page_lookup import PrefixLookup
from diptych.connectors.page_split import Prefix
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.store import Client, ServiceStore
from diptych.connectors.store_scheduler import StoreScheduler
from diptych.connectors.store_settings import StoreSettings
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.engine.core import EngineCore
from diptych.engine.executor import UniprocExecutor
from diptych.engine.request import EngineCoreRequest
from diptych.proto import kvstore_pb2 as pb
from tests.services.test_kvstore import Node, control

PROMPT = [(7 * i) % 250 for i in range(200)]  # three pages and eight tokens


class AlwaysLoad(LoadCosts):
    """A tiny model computes faster than any store."""

    def cut(self, prefix: Prefix, between: Sequence[int], num_queued: int = 0) -> int:
        return prefix.start


class CutInTheMiddle(LoadCosts):
    """As if the store were as fast as the model."""

    def cut(self, prefix: Prefix, between: Sequence[int], num_queued: int = 0) -> int:
        return between[len(between) // 2] if between else prefix.start


MakeCore = Callable[..., EngineCore]


@contextmanager
def making_cores(model: Path) -> Iterator[MakeCore]:
    """Yields what makes engines; they are closed with the block."""
    cores = []

    def make(
        node: Node | None,
        num_blocks: int = 80,
        lookup_timeout_s: float = 60.0,
        *,
        costs: type[LoadCosts] = AlwaysLoad,
        store: Callable[[Client], ServiceStore] = ServiceStore,
        max_num_batched_tokens: int | None = None,
        **flags: bool,
    ) -> EngineCore:
        config = EngineConfig(
            model=str(model),
            num_kv_blocks=num_blocks,
            max_model_len=400,
            max_num_batched_tokens=max_num_batched_tokens,
            num_threads=1,
            reserve_output=False,
        )
        if node is None:
            cores.append(EngineCore(config, UniprocExecutor(config)))
            return cores[-1]
        settings = StoreSettings(kvstore=node.address)
        limits = TransferLimits(trust_stored_s=10.0, transfer_timeout_s=60.0)
        worker = PageConnectorWorker(
            "StoreConnector", lambda: store(settings.open(timeout_s=60.0)), limits
        )
        executor = UniprocExecutor(config, worker)
        lookup = PrefixLookup(
            lambda: settings.open(timeout_s=60.0), time.monotonic, lookup_timeout_s
        )
        scheduler = StoreScheduler(executor.kv_layout, lookup, costs(1, time.monotonic), **flags)
        cores.append(EngineCore(config, executor, scheduler))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    """Each request's output tokens."""
    for request in requests:
        core.add_request(request)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline
        take(core, answers)
    return answers


def take(core: EngineCore, answers: dict[str, list[int]]) -> None:
    """One step; adds what it gave to the answers."""
    outputs = core.step()
    at = 0
    for name, count in zip(
        outputs.request_ids if outputs else [], outputs.token_counts if outputs else [],
        strict=True,
    ):  # fmt: skip
        assert outputs is not None
        answers.setdefault(name, []).extend(outputs.token_ids[at : at + count])
        at += count


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def num_stored(node: Node) -> int:
    return int(control(node).GetStats(pb.GetStatsRequest()).num_objects)
