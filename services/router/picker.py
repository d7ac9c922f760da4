"""Which of several workers takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.clock import Clock
from diptych.services.router.route import Role, Stage


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What a choice may depend on."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0


class Candidate(Protocol):
    """What a choice needs to know of a worker. In-flight figures count from the submission on."""

    @property
    def key(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_tokens_in_flight(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Option:
    """A worker and what it would do. The decode worker of a pair is chosen on its own."""

    worker: Candidate
    stage: Stage


class Picker(Protocol):
    """One choice. Called with at least one option; must not block."""

    def pick(self, options: Sequence[Option], request: PickRequest) -> Option: ...


class LeastLoaded:
    """The worker with the fewest requests; for prefill, with the fewest prompt tokens to compute.
    Random among equals, so that several routers do not all choose the same."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def pick(self, options: Sequence[Option], request: PickRequest) -> Option:
        loads = [self._load(option) for option in options]
        least = min(loads)
        best = [option for option, load in zip(options, loads, strict=True) if load == least]
        return self._clock.random().choice(best)

    @staticmethod
    def _load(option: Option) -> tuple[float, float]:
        worker = option.worker
        if option.stage in (Stage.PREFILL, Stage.PAIR):
            return (worker.num_tokens_in_flight, worker.num_requests)
        return (worker.num_requests, worker.num_tokens_in_flight)
