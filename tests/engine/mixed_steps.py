"""Random steps of every kind: prompts whole and in chunks, decoding, both, of few and of many."""

from __future__ import annotations

import random

from diptych.sampling_params import SamplingParams
from tests.engine.runner_driver import RunnerDriver

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.1, seed=2, top_p=0.9),
    SamplingParams(temperature=1.0, seed=3, top_k=20),
    SamplingParams(temperature=1.0, seed=3, min_p=0.1),
    SamplingParams(temperature=0.5, seed=4, frequency_penalty=0.5),
    SamplingParams(temperature=0.5, seed=4, logit_bias={7: 3.0}),
]


def run_mixed_steps(
    driver: RunnerDriver, count: int, *, most_seqs: int, most_tokens: int, max_model_len: int
) -> None:
    """`count` steps; requests come and go, their prompts of all lengths."""
    rng = random.Random(0)
    alive: list[str] = []
    for number in range(count):
        budget = rng.choice([1, 8, 60, most_tokens])
        step: dict[str, int] = {}
        for name in rng.sample(alive, rng.randint(0, len(alive))):
            left = len(driver.tokens[name]) - driver.computed[name]
            if budget > 0 and driver.computed[name] + left < max_model_len:
                step[name] = min(left, rng.choice([left, 1 + left // 2]), budget)
                budget -= step[name]
        while budget > 0 and len(alive) < most_seqs and rng.random() < 0.7:
            name = f"{number}-{len(alive)}"
            length = min(2 ** rng.randint(0, 13) + rng.randint(-1, 1), max_model_len - 20) or 1
            driver.add(name, [5] * length, rng.choice(PARAMS))
            step[name] = min(length, budget)
            budget -= step[name]
            alive.append(name)
        if step:
            driver.step(step)
        while alive and rng.random() < 0.3:
            driver.finish(alive.pop(rng.randrange(len(alive))))
