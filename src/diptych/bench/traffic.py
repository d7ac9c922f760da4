"""Requests that come while others run, driven step by step through an engine core."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from diptych.engine.core import EngineCore
from diptych.engine.request import EngineCoreRequest, FinishReason
from diptych.errors import EngineError
from diptych.sampling_params import SamplingParams


@dataclass(slots=True)
class Gaps:
    """Seconds between the tokens of each running request, while nothing else came and meanwhile."""

    quiet_s: list[float] = field(default_factory=list)
    meanwhile_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


class Traffic:
    """Greedy requests of random tokens on one core; times are those at which `step` returns."""

    def __init__(self, core: EngineCore, rng: random.Random, vocab_size: int) -> None:
        self._core = core
        self._rng = rng
        self._vocab_size = vocab_size
        self._last_s: dict[str, float] = {}

    def random_tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=count)

    def first_token_s(self, prompt: list[int], gaps: list[float] | None = None) -> float:
        """Seconds from handing over a prompt to its first token, its only one."""
        start = time.perf_counter()
        self._add("arrives", prompt, 1)
        seen: set[str] = set()
        while "arrives" not in seen:
            seen = self._step(gaps)
        return time.perf_counter() - start

    def stalls(self, num_running: int, context: int, prompt_len: int, arrivals: int) -> Gaps:
        """Let prompts of `prompt_len` come one after another while `num_running` requests run."""
        found = Gaps()
        names = [f"running-{i}" for i in range(num_running)]
        room = self._core.info.max_model_len - context
        for name in names:
            self._add(name, self.random_tokens(context), room)
        while self._last_s.keys() != set(names):
            self._step(None)
        self._steps(8, None)
        self._steps(40, found.quiet_s)
        for _ in range(arrivals):
            prompt = self.random_tokens(prompt_len)
            found.first_token_s.append(self.first_token_s(prompt, found.meanwhile_s))
            self._steps(8, None)
        self.drain(names)
        return found

    def drain(self, names: list[str]) -> None:
        """End these requests, and whatever is in flight."""
        self._core.abort(names)
        while self._core.has_work:
            self._core.step()
        self._last_s.clear()

    def _steps(self, count: int, gaps: list[float] | None) -> None:
        for _ in range(count):
            self._step(gaps)

    def _step(self, gaps: list[float] | None) -> set[str]:
        """One step; who got a token. The gaps to their last ones go to `gaps`."""
        outputs = self._core.step()
        now = time.perf_counter()
        seen: set[str] = set()
        if outputs is None:
            return seen
        for name, count, reason in zip(
            outputs.request_ids, outputs.token_counts, outputs.finish_reasons, strict=True
        ):
            if reason == FinishReason.ERROR:
                raise EngineError(f"the engine failed: {self._core.failure}")
            if not count:
                continue
            seen.add(name)
            if name in self._last_s and gaps is not None:
                gaps.append(now - self._last_s[name])
            if reason == FinishReason.UNSPECIFIED:
                self._last_s[name] = now
        return seen

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, seed=0)
        self._core.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        )
