"""Which of several workers, or pairs of them, takes a request: the one with the least predicted
time. Pure but for the choice among near-equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.clock import Clock
from diptych.services.router.paces import Paces
from diptych.services.router.routable import Role
from diptych.services.router.route import Stage

# of a link that was not tested: slower than any that was
_UNTESTED_GB_PER_S = 0.25
# what a step of decode, and with it each request's next token, is later for one more request
_S_PER_REQUEST = 1e-3
# a cache that is so full makes a request wait for room, or others be preempted
_FULL_KV, _FULL_KV_S = 0.9, 1.0
# share of a move that no computing hides: the last chunk is announced when prefill has ended
_UNHIDDEN = 0.25
# times within this of the least are alike, so that several routers do not all choose the same
_ALIKE, _ALIKE_S = 0.05, 2e-4
# pairs are made of the best so many prefill workers, with the best so many decode workers of each
_MOST_PREFILL, _MOST_DECODE = 8, 16


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What a choice may depend on."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV decode must have."""
        return self.num_prompt_tokens + self.num_output_tokens


class Candidate(Protocol):
    """What a choice needs to know of a worker. In-flight figures count from the submission on."""

    @property
    def key(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_tokens_in_flight(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    def reads(self, incarnation: str) -> float | None:
        """GB/s of its link to that worker; None where it was not tested."""
        ...


@dataclass(frozen=True, slots=True)
class Option:
    """A worker and what it would do. A pair has a `partner`, the decode worker."""

    worker: Candidate
    stage: Stage
    partner: Candidate | None = None


class Picker(Protocol):
    """One choice. Called with at least one option; must not block."""

    def pick(self, options: Sequence[Option], request: PickRequest) -> Option: ...


class LeastTime:
    """The option with the least seconds until token 2, as predicted: the prefill worker's queue and
    own work, what of the move of KV that does not hide, the decode worker's load."""

    def __init__(self, clock: Clock, paces: Paces) -> None:
        self._clock = clock
        self._paces = paces

    def pick(self, options: Sequence[Option], request: PickRequest) -> Option:
        timed = [(self.seconds(option, request), option) for option in self._worth(options)]
        least = min(seconds for seconds, _ in timed)
        limit = least * (1 + _ALIKE) + _ALIKE_S
        return self._clock.random().choice([o for seconds, o in timed if seconds <= limit])

    def seconds(self, option: Option, request: PickRequest) -> float:
        """Predicted time of one option."""
        worker, stage = option.worker, option.stage
        if stage is Stage.DECODE:
            return _decode_s(worker)
        own_s = self._paces.s_per_token(worker.key) * request.num_tokens
        prefill_s = self._queue_s(worker) + own_s
        if stage is Stage.WHOLE:
            return prefill_s + _decode_s(worker)
        move_s = self._move_s(option, request)
        # until decode has all: it reads while prefill computes
        arrives_s = max(own_s, move_s) + _UNHIDDEN * min(own_s, move_s) - own_s
        decode_s = 0.0 if option.partner is None else _decode_s(option.partner)
        return prefill_s + arrives_s + decode_s

    def _queue_s(self, worker: Candidate) -> float:
        """A worker without a token to compute may still have requests: they count a little."""
        tokens_s = self._paces.s_per_token(worker.key) * worker.num_tokens_in_flight
        return tokens_s + _S_PER_REQUEST * worker.num_requests

    def _move_s(self, option: Option, request: PickRequest) -> float:
        num_bytes = option.worker.kv_bytes_per_token * request.num_tokens
        if option.partner is None:
            return self._paces.store_s(num_bytes) or 0.0
        gb_per_s = option.partner.reads(option.worker.incarnation) or _UNTESTED_GB_PER_S
        return num_bytes / (gb_per_s * 1e9)

    def _worth(self, options: Sequence[Option]) -> list[Option]:
        """Without pairs that others beat on both sides: of hundreds of workers there are many."""
        if len(options) <= _MOST_PREFILL * _MOST_DECODE:
            return list(options)
        pairs: dict[str, list[Option]] = {}
        for option in options:
            if option.partner is not None:
                pairs.setdefault(option.worker.key, []).append(option)
        kept = sorted(pairs.values(), key=lambda of_one: self._queue_s(of_one[0].worker))
        best = (_best_decode(of_one) for of_one in kept[:_MOST_PREFILL])
        singles = [option for option in options if option.partner is None]
        return [*singles, *(option for of_one in best for option in of_one)]


def _best_decode(pairs: Iterable[Option]) -> list[Option]:
    def seconds(option: Option) -> float:
        assert option.partner is not None
        return _decode_s(option.partner)

    return sorted(pairs, key=seconds)[:_MOST_DECODE]


def _decode_s(worker: Candidate) -> float:
    """What a decode worker's load costs, the harm to what it decodes already included."""
    wait_s = _FULL_KV_S if worker.kv_usage >= _FULL_KV else 0.0
    return wait_s + 2 * _S_PER_REQUEST * worker.num_requests
