"""Steps that have been planned and whose results are not in yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.engine.scheduler_request import SchedulerRequest
from diptych.engine.step import SchedulerOutput


class Share(NamedTuple):
    """One request's part of a step: it computes `num_tokens`, and `samples` one more or not.

    It names the request itself, not its id, which another may bear once this one has ended.
    """

    request: SchedulerRequest
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class StepsInFlight:
    """The shares of each step, by its number; numbers start at 1 and go up."""

    _last: int = 0
    _shares: dict[int, list[Share]] = field(default_factory=dict)
    # steps of which the next needs to know what they give
    _awaited: set[int] = field(default_factory=set)

    def begin(self) -> SchedulerOutput:
        """The next step, empty."""
        self._last += 1
        self._shares[self._last] = []
        return SchedulerOutput(number=self._last)

    def add(self, step: SchedulerOutput, request: SchedulerRequest, count: int) -> None:
        """The step computes the next `count` tokens of the request."""
        step.num_scheduled_tokens[request.request_id] = count
        samples = request.plan(count, step.number)
        self._shares[step.number].append(Share(request, count, samples))
        if request.needs_results:
            self._awaited.add(step.number)

    def settle(self, step: SchedulerOutput) -> list[Share]:
        """The step has completed: its shares, taken off what their requests have in flight."""
        shares = self._shares.pop(step.number)
        self._awaited.discard(step.number)
        for request, num_tokens, samples in shares:
            request.settle(num_tokens, samples)
        return shares

    def before(self, step: SchedulerOutput) -> bool:
        """Whether tokens of an earlier step are in flight."""
        return any(shares for number, shares in self._shares.items() if number < step.number)

    def must_settle(self) -> bool:
        """Whether the next step needs to know what those in flight give."""
        return bool(self._awaited)
