"""Times of one engine: prefills, whole batches, and seconds per output token.

Time per output token (TPOT) is the time for 144 output tokens less the time for 16, over 128, each
the best of two: what prompts cost falls out. docs/benchmarks.md has all definitions.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING

from diptych.bench.ladder_record import DecodeRow, TimeRow
from diptych.bench.offline import random_prompts
from diptych.bench.points import Point
from diptych.bench.roofline import Roofline
from diptych.inputs import TokensPrompt
from diptych.sampling_params import SamplingParams

if TYPE_CHECKING:
    from diptych.engine.llm import LLM

SHORT, LONG = 16, 144
ROUNDS = 2
# a quantity's runs go on until there are this many, or they took this long
_RUNS, _RUNS_S = 5, 2.0


class Measure:
    """Rows of one engine. Prompts are random tokens, all greedy, with `ignore_eos`.

    Args:
        deadline_s: by the monotonic clock; a row whose second round would not fit keeps its first.
    """

    def __init__(
        self, llm: LLM, roofline: Roofline, seed: int, deadline_s: float = float("inf")
    ) -> None:
        self._llm = llm
        self._roofline = roofline
        self._rng = random.Random(seed)
        self._deadline_s = deadline_s
        self._floor_s = self._spent_s = 0.0

    def row(self, kind: str, point: Point) -> TimeRow | DecodeRow:
        """One row.

        Prefill: until all prompts have one token, and latency: until all requests have theirs; of
        each the median of several runs after one not counted. Throughput: many requests at once,
        once, for their number is a warm-up of its own. Decode: seconds per output token.
        """
        if kind == "decode":
            return self._decode(point)
        if kind == "throughput":
            floor_s = self._roofline.throughput_s(*point)
            return self._row(point, [self._time(point)], floor_s)
        return self._median(point, self._roofline.batch_s(*point))

    def _decode(self, point: Point) -> DecodeRow:
        prompts = self._prompts(point)
        short: list[float] = []
        long: list[float] = []
        for _ in range(ROUNDS):
            short.append(self._time(point._replace(output=SHORT), prompts))
            long.append(self._time(point._replace(output=LONG), prompts))
            if time.monotonic() + short[-1] + long[-1] > self._deadline_s:
                break
        return DecodeRow(
            batch=point.batch,
            context=point.length,
            tpot_s=(min(long) - min(short)) / (LONG - SHORT),
            short_s=short,
            long_s=long,
            floor_s=self._roofline.decode_s(point.batch, point.length),
            # a step that makes token k reads the prompt and k - 1 tokens
            mean_context=point.length + (SHORT + LONG - 1) / 2,
        )

    def least_s(self, kind: str, point: Point) -> float:
        """Seconds that a row takes at the floor, with the fewest runs."""
        roofline = self._roofline
        if kind == "throughput":
            return roofline.throughput_s(*point)
        if kind == "decode":
            return sum(roofline.batch_s(point.batch, point.length, n) for n in (SHORT, LONG))
        return 3 * roofline.batch_s(*point)

    @property
    def times_floor(self) -> float:
        """How far from the floor all runs so far were."""
        return self._spent_s / self._floor_s if self._floor_s else 1.0

    def _median(self, point: Point, floor_s: float) -> TimeRow:
        prompts = self._prompts(point)
        self._time(point, prompts)
        runs: list[float] = []
        while len(runs) < 2 or (len(runs) < _RUNS and sum(runs) < _RUNS_S):
            runs.append(self._time(point, prompts))
        return self._row(point, runs, floor_s)

    @staticmethod
    def _row(point: Point, runs: list[float], floor_s: float) -> TimeRow:
        return TimeRow(
            batch=point.batch,
            input_len=point.length,
            output_len=point.output,
            time_s=statistics.median(runs),
            runs_s=runs,
            floor_s=floor_s,
        )

    def _prompts(self, point: Point) -> list[TokensPrompt]:
        vocab_size = self._llm.model_config.vocab_size
        return random_prompts(self._rng, point.batch, point.length, vocab_size)

    def _time(self, point: Point, prompts: list[TokensPrompt] | None = None) -> float:
        """Seconds until all prompts have their greedy tokens."""
        prompts = prompts or self._prompts(point)
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=point.output, detokenize=False
        )
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == point.output for o in outputs)
        self._spent_s += elapsed_s
        self._floor_s += self._roofline.batch_s(*point)
        return elapsed_s
