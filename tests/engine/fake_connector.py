"""A connector whose store is a dict of tokens, driven by hand: what a transfer does, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.connectors.base import (
    HandedOver,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    RequestView,
)
from diptych.engine.request import KVCommit, KVObject
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.fake_executor import FakeExecutor, LateDevice, Row, prefix_names


def commit_of(num_tokens: int, cached: int = 0, epoch: int = 1) -> KVCommit:
    whole = KVObject(key=b"k" * 32, start_token=0, end_token=num_tokens, checksum=0, num_bytes=1)
    return KVCommit(
        epoch=epoch,
        kv_namespace="",
        num_tokens=num_tokens,
        objects=[whole] if num_tokens else [],
        connector="fake",
        num_cached_tokens=cached,
    )


@dataclass
class Load:
    token_ids: list[int]
    block_ids: list[int]
    start: int
    end: int


@dataclass
class FakeConnector(KVConnectorScheduler):
    """Loads what a commit names, or `available` tokens of any prompt; saves hand-offs.

    A request computes the first `beside` of the tokens found itself. With `reloads` a preempted one
    loads again.
    """

    available: int = 0
    beside: int = 0
    reloads: bool = False
    is_async: bool = True
    loads: dict[str, Load] = field(default_factory=dict)
    sending: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    read_by_peers: set[str] = field(default_factory=set)
    expects: bool = False
    on_await: Callable[[], None] = lambda: None
    arrived: KVConnectorOutput | None = None
    # until when, on the clock of the core, KV is worth to wait for
    ready_s: float = 0.0
    awaited: list[tuple[float, bool]] = field(default_factory=list)
    num_flushes: int = 0

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        self.awaited.append((until_s, first))
        self.on_await()

    def hold_until_s(self, limit_s: float) -> float:
        return self.ready_s if self.ready_s <= limit_s and self.arrived is None else 0.0

    def take_arrived(self) -> KVConnectorOutput | None:
        arrived, self.arrived = self.arrived, None
        return arrived

    def flush(self) -> None:
        self.num_flushes += 1

    @property
    def is_expecting(self) -> bool:
        return self.expects

    def request_preempted(self, request: RequestView) -> bool:
        return self.reloads

    def is_read(self, request_id: str) -> bool:
        return request_id in self.read_by_peers

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, num_pending_tokens: int = 0
    ) -> tuple[int, bool]:
        have = min(self._num_available(request), len(request.prompt_token_ids))
        found = have - num_computed_tokens
        return (found, self.is_async) if found > 0 else (0, False)

    def _num_available(self, request: RequestView) -> int:
        params = request.kv_transfer_params
        commit = params.commit if params is not None else None
        return commit.num_tokens if commit is not None else self.available

    def num_computed_beside(self, request: RequestView) -> int:
        params = request.kv_transfer_params
        return 0 if params is not None and params.commit is not None else self.beside

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            end = min(self._num_available(request), len(request.prompt_token_ids))
            self.loads[request.request_id] = Load(
                list(request.prompt_token_ids),
                list(block_ids),
                end - num_external_tokens,
                end,
            )

    def build_connector_meta(
        self, scheduled: dict[str, tuple[RequestView, list[int], int]]
    ) -> KVConnectorMetadata:
        for request_id, (request, _, end) in scheduled.items():
            params = request.kv_transfer_params
            if params and params.do_remote_decode and end >= len(request.prompt_token_ids):
                self.sending.add(request_id)
        return KVConnectorMetadata()

    def request_finished(self, request: RequestView, block_ids: list[int]) -> bool:
        return request.request_id in self.sending

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


# What a load that has not ended may have written already.
TORN = -1


@dataclass
class FakeTransfers:
    """The worker half: transfers end when the test says so. Until then a load writes something else
    than KV, at any time, and a step that writes there as well is a bug."""

    executor: FakeExecutor
    connector: FakeConnector
    report: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    sync_valid: dict[str, int] = field(default_factory=dict)

    def finish_load(self, request_id: str, num_valid_tokens: int | None = None) -> None:
        load = self.connector.loads.pop(request_id)
        end = load.end if num_valid_tokens is None else num_valid_tokens
        names = prefix_names(load.token_ids)
        for position, slot in zip(range(load.start, load.end), self._slots(load), strict=True):
            self.executor.slots[slot] = names[position] if position < end else TORN
        self.report.finished_recving.add(request_id)
        if num_valid_tokens is not None:
            self.report.failed_recving[request_id] = num_valid_tokens

    def arrive(self, request_id: str, token_id: int) -> None:
        """A peer's KV is here, with the token after the prompt."""
        self.finish_load(request_id)
        self.report.finished_recving.discard(request_id)
        arrived = KVConnectorOutput(finished_recving={request_id})
        arrived.handed_over[request_id] = HandedOver(token_id, 0)
        self.connector.arrived = arrived

    def finish_save(self, request_id: str, commit: KVCommit | None) -> None:
        self.connector.sending.discard(request_id)
        self.report.finished_sending.add(request_id)
        if commit is not None:
            self.report.commits[request_id] = commit

    def _slots(self, load: Load) -> list[int]:
        row = Row(load.token_ids, len(load.token_ids), load.block_ids)
        return [self.executor._slot(row, position) for position in range(load.start, load.end)]

    def take_sent(self) -> KVConnectorOutput | None:
        return self.report.split_sent()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if not self.connector.is_async:
            for request_id in list(self.connector.loads):
                self.finish_load(request_id, self.sync_valid.get(request_id))
        targets = [slot for load in self.connector.loads.values() for slot in self._slots(load)]
        for slot in targets:
            self.executor.slots[slot] = TORN
        output = self.executor.execute_model(step)
        assert {self.executor.slots[slot] for slot in targets} <= {TORN}, (
            "a step has written to where a load writes"
        )
        output.kv_connector_output, self.report = self.report, KVConnectorOutput()
        return output


class Served:
    """A fake executor whose connector's worker half is `transfers`."""

    def __init__(self, executor: FakeExecutor, transfers: FakeTransfers) -> None:
        self.kv_layout = executor.kv_layout
        self.kv_namespace = executor.kv_namespace
        self.execute_model = transfers.execute_model
        self.submit_step = LateDevice(executor, transfers).submit_step
        self.shutdown = executor.shutdown
