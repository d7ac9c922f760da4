"""The seam between scheduler and runner: what one step is, and what it gave.

Request state lives in rows of the runner; the scheduler sends a request whole once (`NewRequest`)
and from then on only what changed (`RunningRequest`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from diptych.connectors.base import KVConnectorMetadata, KVConnectorOutput, KVLayout
from diptych.engine.request import TokenLogprobs
from diptych.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequest:
    """A request that enters the batch: new, or resumed after preemption.

    `token_ids` are the prompt and the output so far; `num_prompt_tokens` splits them.
    `block_ids` has one list per KV-cache group, each covering all tokens up to this step's end.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class RunningRequest:
    """A request that is in the runner's rows already; `new_block_ids` are appended, per group."""

    request_id: str
    new_block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step. The runner drops the rows of `finished_request_ids` (ended or preempted) first.

    For each scheduled request, `num_scheduled_tokens` tokens from `num_computed_tokens` on are
    computed; where they reach the last token, one token is sampled. The last token may be one that
    the step before samples, of which the device alone knows so far. `number` counts steps from 1.
    """

    new_requests: list[NewRequest] = field(default_factory=list)
    running_requests: list[RunningRequest] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_request_ids: list[str] = field(default_factory=list)
    kv_connector_metadata: KVConnectorMetadata | None = None
    number: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave. A request whose prompt is not finished has no entry in `sampled`.

    `prompt_logprobs` carries those of the prompt positions computed in this step (the
    log probability of prompt token p comes with the step that computed p - 1), where asked for.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None


class StepHandle(Protocol):
    """A step that the device has been given."""

    def wait(self, saving: bool) -> KVConnectorOutput | None:
        """Return once the step's device work is over; with `saving` sooner, with hand-offs whose
        saves have ended: somebody waits for them."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's device work; called once, in the order of the steps."""
        ...


class Executor(Protocol):
    """Runs steps on one or more devices."""

    @property
    def kv_layout(self) -> KVLayout:
        """The KV cache, sized; known once the executor is made."""
        ...

    @property
    def kv_namespace(self) -> bytes:
        """Digest of what makes KV compatible (`hashing.namespace_digest`)."""
        ...

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. With no scheduled tokens it only serves the connector."""
        ...

    def submit_step(self, step: SchedulerOutput) -> StepHandle:
        """Give the device one step and do not wait for it; at most two are in flight."""
        ...

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        ...
