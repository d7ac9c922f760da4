"""Drives an executor by hand-made steps, in place of a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.config import EngineConfig
from diptych.connectors.base import KVConnectorMetadata, KVConnectorWorker
from diptych.engine.executor import UniprocExecutor
from diptych.engine.step import (
    ModelRunnerOutput,
    NewRequest,
    RunningRequest,
    SchedulerOutput,
    StepHandle,
)
from diptych.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=2)


class RunnerDriver:
    """Requests with their own blocks; the caller says how many tokens each step computes."""

    def __init__(
        self, model: Path, connector: KVConnectorWorker | None = None, **settings: Any
    ) -> None:
        defaults = {"device": "cpu", "num_kv_blocks": 64, "max_model_len": 512}
        config = EngineConfig(**{"model": str(model)} | defaults | settings)
        self.executor = UniprocExecutor(config, connector)
        self.block_size = self.executor.kv_layout.block_size
        self._next_block = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self._new: list[NewRequest] = []
        self._finished: list[str] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        *,
        output: list[int] | None = None,
        shared_with: str | None = None,
        num_shared: int = 0,
    ) -> None:
        """A request enters with the next step; its first `num_shared` tokens lie in the blocks of
        another."""
        self.tokens[name] = prompt + (output or [])
        self.num_prompt[name] = len(prompt)
        self.computed[name] = num_shared
        self.blocks[name] = []
        if shared_with is not None:
            self.blocks[name] = self.blocks[shared_with][: num_shared // self.block_size]
        self._grow(name, len(self.tokens[name]))
        self._new.append(
            NewRequest(
                request_id=name,
                token_ids=list(self.tokens[name]),
                num_prompt_tokens=len(prompt),
                sampling_params=params,
                eos_token_ids=[],
                block_ids=(list(self.blocks[name]),),
                num_computed_tokens=num_shared,
            )
        )

    def finish(self, name: str) -> None:
        """The request's row is dropped at the start of the next step."""
        self._finished.append(name)

    def preempt(self, name: str, params: SamplingParams = GREEDY) -> None:
        """Its row and blocks are gone; it enters again with what it has sampled."""
        self.finish(name)
        prompt = self.tokens[name][: self.num_prompt[name]]
        self.add(name, prompt, params, output=self.tokens[name][len(prompt) :])

    def step(
        self, counts: dict[str, int], metadata: KVConnectorMetadata | None = None
    ) -> ModelRunnerOutput:
        """Compute `counts[name]` tokens of each request."""
        output = self.submit(counts, metadata).result()
        for name in counts:
            self.tokens[name] += output.sampled_token_ids.get(name, [])
        return output

    def submit(
        self, counts: dict[str, int], metadata: KVConnectorMetadata | None = None
    ) -> StepHandle:
        """Begin to compute them; the caller takes the result."""
        new = {request.request_id for request in self._new}
        running = []
        for name, count in counts.items():
            if name not in new:
                grown = self._grow(name, self.computed[name] + count)
                running.append(RunningRequest(name, (grown,), self.computed[name]))
        handle = self.executor.submit_step(
            SchedulerOutput(self._new, running, dict(counts), self._finished, metadata)
        )
        self._new, self._finished = [], []
        for name, count in counts.items():
            self.computed[name] += count
        return handle

    def decode(self, name: str, steps: int) -> list[int]:
        """Sample on alone; returns the whole output."""
        for _ in range(steps):
            self.step({name: len(self.tokens[name]) - self.computed[name]})
        return self.tokens[name][self.num_prompt[name] :]

    def _grow(self, name: str, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self.block_size) - len(self.blocks[name])
        grown = list(range(self._next_block, self._next_block + max(missing, 0)))
        self._next_block += len(grown)
        self.blocks[name] += grown
        return grown
