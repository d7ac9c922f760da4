"""An executor without a model: its KV is the name of the prefix, its next token a hash of it.

It checks, at every step, that the blocks it was given hold the very tokens that they should.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from diptych.config import EngineConfig
from diptych.connectors.base import KVConnectorOutput, KVLayout
from diptych.engine.core import EngineCore
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from diptych.errors import ModelLoadError

BLOCK = 16
VOCAB = 1000


def prefix_names(token_ids: list[int]) -> list[int]:
    """Entry i names the tokens up to and including i."""
    names, name = [], 0
    for token in token_ids:
        name = hash((name, token, 7919))
        names.append(name)
    return names


def next_token(token_ids: list[int]) -> int:
    return prefix_names(token_ids)[-1] % VOCAB


def expected_output(prompt: list[int], count: int) -> list[int]:
    """What any engine must answer, whatever its batches."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]


class FakeExecutor:
    def __init__(self, num_blocks: int = 64, block_size: int = BLOCK, fail_at: int = -1) -> None:
        self.kv_layout = KVLayout(
            num_blocks=num_blocks,
            num_kv_heads=1,
            num_layers=1,
            block_size=block_size,
            head_dim=1,
            dtype="float32",
        )
        self.kv_namespace = b"fake" * 8
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[str, Row] = {}
        self.steps: list[dict[str, int]] = []
        self.closed = False
        self.checks_reads = True
        self._fail_at = fail_at

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(dict(step.num_scheduled_tokens))
        if len(self.steps) - 1 == self._fail_at:
            raise RuntimeError("the device is gone")
        computed = self._update_rows(step)
        output = ModelRunnerOutput()
        for request_id, count in step.num_scheduled_tokens.items():
            row, start = self.rows[request_id], computed[request_id]
            self._write(row, start, start + count)
            if start + count == len(row.token_ids):
                row.token_ids.append(self._read(row, start + count) % VOCAB)
                output.sampled_token_ids[request_id] = row.token_ids[-1:]
        return output

    def submit_step(self, step: SchedulerOutput) -> LateStep:
        return LateDevice(self, self).submit_step(step)

    def shutdown(self) -> None:
        self.closed = True

    def _update_rows(self, step: SchedulerOutput) -> dict[str, int]:
        for request_id in step.finished_request_ids:
            del self.rows[request_id]
        computed = {}
        for new in step.new_requests:
            assert new.request_id not in self.rows
            blocks = list(new.block_ids[0])
            self.rows[new.request_id] = Row(list(new.token_ids), new.num_prompt_tokens, blocks)
            computed[new.request_id] = new.num_computed_tokens
        for running in step.running_requests:
            self.rows[running.request_id].block_ids.extend(running.new_block_ids[0])
            computed[running.request_id] = running.num_computed_tokens
        return computed

    def _slot(self, row: Row, position: int) -> int:
        size = self.kv_layout.block_size
        return row.block_ids[position // size] * size + position % size

    def _write(self, row: Row, start: int, end: int) -> None:
        names = prefix_names(row.token_ids[:end])
        for position in range(start, end):
            self.slots[self._slot(row, position)] = names[position]

    def _read(self, row: Row, end: int) -> int:
        """The last name; every slot before it must hold the request's own prefix."""
        names = prefix_names(row.token_ids[:end])
        held = [self.slots[self._slot(row, position)] for position in range(end)]
        assert held == names or not self.checks_reads, (
            "a block holds something else than the request's tokens"
        )
        return names[-1]


class Runs(Protocol):
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput: ...


class LateDevice:
    """Does all of a step's work only when its result is asked for: as late as a device may."""

    def __init__(self, executor: FakeExecutor, runs: Runs) -> None:
        self.kv_layout = executor.kv_layout
        self.kv_namespace = executor.kv_namespace
        self.shutdown = executor.shutdown
        self.execute_model = runs.execute_model
        self.submitted: list[dict[str, int]] = []
        self.in_flight: list[SchedulerOutput] = []
        self.most_in_flight = 0
        self.waited: list[int] = []
        self.take_sent: Callable[[], KVConnectorOutput | None] = getattr(
            runs, "take_sent", lambda: None
        )
        self.on_submit: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None

    @property
    def computing(self) -> list[bool]:
        """Of each step in flight, whether it computes anything."""
        return [bool(step.num_scheduled_tokens) for step in self.in_flight]

    def submit_step(self, step: SchedulerOutput) -> LateStep:
        assert len(self.in_flight) < 2, "more than one step ahead"
        self.submitted.append(dict(step.num_scheduled_tokens))
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, sum(self.computing))
        self.on_submit()
        return LateStep(self, step)


@dataclass
class LateStep:
    device: LateDevice
    step: SchedulerOutput

    def wait(self, saving: bool) -> KVConnectorOutput | None:
        if saving and (sent := self.device.take_sent()) is not None:
            return sent
        self.device.waited.append(self.step.number)
        self.device.on_wait()
        return None

    def result(self) -> ModelRunnerOutput:
        assert self.device.in_flight.pop(0) is self.step, "results are taken out of order"
        return self.device.execute_model(self.step)


def make_core(config: EngineConfig) -> EngineCore:
    """Factories by name, for engines in processes of their own."""
    return EngineCore(config, FakeExecutor())


def make_failing_core(config: EngineConfig) -> EngineCore:
    return EngineCore(config, FakeExecutor(fail_at=1))


def make_slow_core(config: EngineConfig) -> EngineCore:
    executor = FakeExecutor()
    execute = executor.execute_model

    def slow(step: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(0.02)
        return execute(step)

    executor.execute_model = slow  # type: ignore[method-assign]
    return EngineCore(config, executor)


def find_no_model(config: EngineConfig) -> EngineCore:
    raise ModelLoadError(f"{config.model} is not there")


def break_while_building(config: EngineConfig) -> EngineCore:
    raise ZeroDivisionError("a slip")


def die_while_building(config: EngineConfig) -> EngineCore:
    os._exit(7)


def build_for_ever(config: EngineConfig) -> EngineCore:
    time.sleep(3600)
    raise AssertionError
