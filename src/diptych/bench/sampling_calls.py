"""What `diptych bench kernels` calls of sampling: a batch of one kind of request each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from diptych.engine.sampler import Sampler
from diptych.engine.sampling_rows import SamplingRows
from diptych.engine.step import NewRequest
from diptych.kernels.dispatch import Ops
from diptych.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0),
        "bad_words_token_ids": [[7, 8, 9]],
    },
}
# a few tokens stand above the others, as in a text
_NUM_LIKELY, _SPREAD, _LEAD = 200, 2.2, 9.0


def sampling_calls(
    ops: Ops, batch: int, vocab_size: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Of each kind its name, and the call that samples `batch` rows of bfloat16 logits."""
    logits = torch.randn(batch, vocab_size, device=device) * _SPREAD
    likely = torch.randperm(vocab_size, device=device)[:_NUM_LIKELY]
    logits[:, likely] += _LEAD * torch.rand(batch, len(likely), device=device)
    logits = logits.bfloat16()
    order = torch.arange(batch, device=device)
    for name, values in KINDS.items():
        rows = SamplingRows(batch, vocab_size, device)
        for row in range(batch):
            params = SamplingParams(seed=row, **values)
            rows.set(row, NewRequest(str(row), list(range(100)), 50, params, [], ([],), 0))
        rows.flush()
        yield name, partial(Sampler(ops, rows).sample, logits, order, order)
