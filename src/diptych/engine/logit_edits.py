"""What a request adds to the logits of certain tokens, as a row of the sampling tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.kernels import sampling_tables as tables
from diptych.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """One row of `SamplingTables.edits` and of `prefixes`.

    Attributes:
        count: edits used.
        edits: `[4, E]` int32.
        prefixes: `[W]` int32.
        remembers: whether they look at output tokens.
    """

    count: int
    edits: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    remembers: bool


def make_logit_edits(
    params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int
) -> LogitEdits | None:
    """`logit_bias`, `bad_words` and `min_tokens`; None if there is nothing to add.

    `SamplingParams.check_logit_edits` holds: they fit.
    """
    found = sorted(_edits(params, eos_token_ids), key=lambda edit: edit[0])
    found = [edit for edit in found if edit[0] < vocab_size]
    if not found:
        return None
    edits = np.zeros((4, tables.MAX_EDITS), np.int32)
    prefixes = np.zeros(tables.MAX_PREFIX_TOKENS, np.int32)
    start = 0
    for e, (token, bias, until, prefix) in enumerate(found):
        bits = np.float32(bias).view(np.int32)
        edits[:, e] = (token, bits, until, start * 256 + len(prefix))
        prefixes[start : start + len(prefix)] = prefix
        start += len(prefix)
    return LogitEdits(len(found), edits, prefixes, remembers=start > 0)


def _edits(
    params: SamplingParams, eos_token_ids: Sequence[int]
) -> Iterator[tuple[int, float, int, Sequence[int]]]:
    """(token, bias, before which output token, after which output)."""
    for token, bias in (params.logit_bias or {}).items():
        yield token, bias, tables.FOREVER, ()
    for *prefix, token in params.bad_words_token_ids or []:
        yield token, -math.inf, tables.FOREVER, prefix
    if params.min_tokens:
        for token in {*(params.stop_token_ids or []), *eos_token_ids}:
            yield token, -math.inf, params.min_tokens, ()
