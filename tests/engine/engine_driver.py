"""Drives a scheduler with a fake executor and gathers what clients would see."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore, EngineState
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, FinishReason, KVCommit
from diptych.engine.scheduler import Scheduler
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.fake_connector import FakeConnector, FakeTransfers
from tests.engine.fake_executor import FakeExecutor, LateDevice

# so that requests run out of blocks where a test means them to
PRESSED = {"reserve_output": False}


@dataclass
class Client:
    """One request's answer as its client sees it."""

    tokens: dict[int, int] = field(default_factory=dict)
    reason: FinishReason = FinishReason.UNSPECIFIED
    stop_token_id: int = -1
    num_cached_tokens: int = 0
    commit: KVCommit | None = None
    error: str | None = None
    num_ends: int = 0

    @property
    def output(self) -> list[int]:
        assert sorted(self.tokens) == list(range(min(self.tokens, default=0), len(self)))
        return [self.tokens[p] for p in sorted(self.tokens)]

    def __len__(self) -> int:
        return max(self.tokens, default=-1) + 1


class Driver:
    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 16,
        connector: FakeConnector | None = None,
        **config: Any,
    ) -> None:
        self.executor = FakeExecutor(num_blocks, block_size)
        self.connector = connector
        self.transfers = FakeTransfers(self.executor, connector) if connector else None
        self.scheduler = Scheduler(
            EngineConfig(**PRESSED | config),
            self.executor.kv_layout,
            self.executor.kv_namespace,
            connector,
        )
        self.clients: dict[str, Client] = {}

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.clients[request.request_id] = Client()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort_requests(request_ids)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Take a step's results."""
        self.scheduler.update(step, output)
        self.take(self.scheduler.take_outputs())

    def step(self) -> dict[str, int]:
        """One step; returns the tokens computed for each request."""
        step = self.scheduler.schedule()
        output = (self.transfers or self.executor).execute_model(step)
        self.update(step, output)
        self.check()
        return dict(step.num_scheduled_tokens)

    def run(self, most: int = 1000) -> None:
        """Step until nothing is left."""
        while self.has_work:
            self.step()
            most -= 1
            assert most, "the engine does not come to an end"

    def run_with_loads(self, most: int = 1000) -> None:
        """Step until nothing is left; each load ends well before the next step."""
        while self.has_work:
            assert self.connector is not None
            assert self.transfers is not None
            for request_id in list(self.connector.loads):
                self.transfers.finish_load(request_id)
            self.step()
            most -= 1
            assert most, "the engine does not come to an end"

    def take(self, outputs: EngineCoreOutputs) -> None:
        taken = 0
        for i, request_id in enumerate(outputs.request_ids):
            client = self.clients[request_id]
            assert not client.num_ends, "an entry after the end"
            count = outputs.token_counts[i]
            for offset in range(count):
                position = outputs.first_positions[i] + offset
                assert position not in client.tokens, "a position was sent twice"
                client.tokens[position] = outputs.token_ids[taken + offset]
            taken += count
            client.reason = FinishReason(outputs.finish_reasons[i])
            client.stop_token_id = outputs.stop_token_ids[i]
            client.num_cached_tokens = outputs.num_cached_tokens[i]
            client.commit = outputs.commits.get(i)
            client.error = outputs.errors.get(i)
            client.num_ends += bool(client.reason) or client.commit is not None

    def check(self) -> None:
        """No block is lost, and each is counted by exactly those who hold it."""
        kv = self.scheduler._kv
        quarantined = [blocks for blocks, _ in kv._quarantine.values()]
        held = [*kv.req_to_blocks.values(), *quarantined, *kv.fence.held]
        counts = [0] * kv.pool.num_blocks
        for groups in held:
            for block in groups[0] if groups else ():
                counts[block.block_id] += 1
        assert counts == [block.ref_count for block in kv.pool.blocks]
        assert kv.pool.num_free == counts.count(0)

    @property
    def stats(self) -> Any:
        return self.scheduler.stats


class OverlapDriver(Driver):
    """Plans a step ahead through an engine core, on a device that does its work late."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 16,
        connector: FakeConnector | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        **config: Any,
    ) -> None:
        super().__init__(num_blocks, block_size=block_size, connector=connector, **config)
        self.device = LateDevice(self.executor, self.transfers or self.executor)
        self.core = EngineCore(
            EngineConfig(async_scheduling=True, **PRESSED | config),
            self.device,
            connector,
            monotonic,
        )
        self.scheduler = self.core._scheduler

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def abort(self, *request_ids: str) -> None:
        self.core.abort(request_ids)

    def step(self) -> dict[str, int]:
        """One turn of the core; returns the tokens of the step that it gave to the device."""
        before = len(self.device.submitted)
        outputs = self.core.step()
        assert self.core.state is EngineState.READY, self.core.failure
        if outputs is not None:
            self.take(outputs)
        self.check()
        return self.device.submitted[-1] if len(self.device.submitted) > before else {}


class FastLoadsDriver(OverlapDriver):
    """Loads are over as soon as they are ordered, before the device has begun the steps before."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.device.on_submit = self._finish_loads

    def _finish_loads(self) -> None:
        if self.transfers is not None and self.connector is not None:
            for request_id in list(self.connector.loads):
                self.transfers.finish_load(request_id)
