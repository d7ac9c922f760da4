"""Sampling by tables in plain torch: the meaning of `sample_rows`, and what a CPU runs.

It lets the host look at the tables. A CPU takes 3 ms to sort 49,152 logits, so limits are looked
for among the most likely ones first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels import sampling_tables as tables
from diptych.kernels.noise import gumbel_noise
from diptych.kernels.sampling_tables import SamplingTables

_PARTIAL_SORT = 1024
_UNITS = float(1 << tables.WEIGHT_BITS)


def sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingTables, limits: bool = True
) -> Tensor:
    """Sample each row by its part of the tables, which then know the token.

    Constraints (allowed tokens, edits), penalties, temperature, min-p, top-k, top-p, Gumbel-max.
    Of equal logits top-k and top-p keep all or none; of equal maxima the first is taken; NaN is
    taken never.

    Args:
        logits: `[R, V]` float32 or bfloat16; stays as it is.
        rows: `[R]` int64, each once; -1 for padding.
        positions: `[R]` int64, output tokens of each row so far, which key the noise.
        state: the tables; counts and recent tokens of these rows are written.
        limits: False if none of the rows has top-k, top-p or min-p.

    Returns:
        `[R]` int64; 0 for padding.
    """
    live = (rows >= 0).nonzero()[:, 0]
    tokens = torch.zeros_like(rows)
    rows, positions = rows[live], positions[live]
    x = adjust_logits(logits[live], rows, positions, state)
    if limits:
        _limit(x, rows, state)
    random = state.floats[rows, tables.TEMPERATURE] > 0.0
    if bool(random.any()):
        seeds = state.ints[rows, tables.SEED]
        noise = gumbel_noise(seeds, positions, x.shape[1])
        x = torch.where(random[:, None], x + noise, x)
    tokens[live] = x.argmax(-1)
    _remember(tokens[live], rows, positions, state)
    return tokens


def adjust_logits(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingTables) -> Tensor:
    """`[R, V]` float32: logits after constraints, penalties and temperature."""
    x = logits.to(torch.float32, copy=True)
    x.masked_fill_(x.isnan(), -torch.inf)
    flags = state.ints[rows, tables.FLAGS]
    members = _with(flags, tables.ALLOWED)
    if len(members):
        at = torch.arange(x.shape[1], device=x.device)
        bits = state.allowed[rows[members]][:, at // 32] >> (at % 32)
        x[members] = x[members].masked_fill_((bits & 1) == 0, -torch.inf)
    for i in _with(flags, tables.EDITED).tolist():
        _edit(x[i], int(rows[i]), int(positions[i]), state)
    members = _with(flags, tables.PENALISED)
    if len(members):
        x[members] = _penalised(x[members], rows[members], state)
    temperature = state.floats[rows, tables.TEMPERATURE]
    return x.div_(torch.where(temperature == 0.0, 1.0, temperature)[:, None])


def least_kept(x: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor) -> Tensor:
    """The smallest logit that top-k, then top-p, keep of those that are not below the floor.

    Args:
        x: `[P, V]` float32.
        top_k: `[P, 1]` int64, 0 for none; top_p, floor: `[P, 1]` float32.

    Returns:
        `[P, 1]` float32.
    """
    vocab, top = x.shape[1], x.amax(-1, keepdim=True).clamp(min=-tables.LARGEST)
    # [P, 1]
    total = torch.where(x >= floor, _weights(x, top), 0).sum(-1, keepdim=True)
    deepest = int(top_k.max()) if bool((top_k > 0).all()) else vocab
    depth = min(deepest, _PARTIAL_SORT, vocab)
    least, found = _least_in(x.topk(depth).values, top, top_k, top_p, floor, total)
    if depth < vocab and not bool(found.all()):
        rest = (~found[:, 0]).nonzero()[:, 0]
        values = x[rest].sort(descending=True).values
        args = (top[rest], top_k[rest], top_p[rest], floor[rest], total[rest])
        least[rest] = _least_in(values, *args)[0]
    return least


def _least_in(
    values: Tensor, top: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest kept of the largest logits, which descend, and whether it is that of all."""
    kept = values >= floor
    weights = torch.where(kept, _weights(values, top), 0)
    by_k = top_k > 0
    kept &= ~by_k | (torch.arange(values.shape[1], device=values.device) < top_k)
    of_k = torch.where(kept, weights, 0).sum(-1, keepdim=True)
    wanted = top_p.double() * torch.where(by_k, of_k, total).double()
    sums = weights.cumsum(-1)
    kept &= (top_p >= 1.0) | ((sums - weights).double() < wanted)
    found = torch.where(by_k, top_k <= values.shape[1], sums[:, -1:].double() >= wanted)
    return values.gather(1, kept.sum(-1, keepdim=True).clamp_(min=1) - 1), found


def _limit(x: Tensor, rows: Tensor, state: SamplingTables) -> None:
    """Mask what top-k, top-p and min-p remove, in place."""
    members = _with(state.ints[rows, tables.FLAGS], tables.LIMITED)
    if not len(members):
        return
    rows = rows[members]
    kept = x[members].clamp_(max=tables.LARGEST)
    floor = kept.amax(-1) + state.floats[rows, tables.LOG_MIN_P]
    least = floor.clamp_(min=-tables.LARGEST)[:, None]
    top_k, top_p = state.ints[rows, tables.TOP_K, None], state.floats[rows, tables.TOP_P, None]
    searched = ((top_k > 0) | (top_p < 1.0))[:, 0].nonzero()[:, 0]
    if len(searched):
        least[searched] = least_kept(
            kept[searched], top_k[searched], top_p[searched], least[searched]
        )
    x[members] = kept.masked_fill_(kept < least, -torch.inf)


def _weights(x: Tensor, top: Tensor) -> Tensor:
    """`exp(x - top)` in int64 with 38 binary places: sums of them have no order."""
    return (x - top).exp_().mul_(_UNITS).long()


def _with(flags: Tensor, flag: int) -> Tensor:
    """Indices of the rows that have the flag."""
    return ((flags & flag) != 0).nonzero()[:, 0]


def _edit(x: Tensor, row: int, position: int, state: SamplingTables) -> None:
    """`x` is one row, `[V]`."""
    count = int(state.ints[row, tables.NUM_EDITS])
    token, bias_bits, until, prefix = state.edits[row, :, :count]
    applies = position < until
    for e in (prefix % 256 > 0).nonzero()[:, 0].tolist():
        start, length = divmod(int(prefix[e]), 256)
        applies[e] &= position >= length
        last = torch.arange(max(position, length) - length, max(position, length))
        ends = state.recent[row][last.to(x.device) % state.recent.shape[1]]
        applies[e] &= torch.equal(ends, state.prefixes[row, start : start + length])
    bias = bias_bits.view(torch.float32).where(applies, 0.0)
    x.index_add_(0, token.long(), bias)


def _penalised(x: Tensor, rows: Tensor, state: SamplingTables) -> Tensor:
    """Repetition counts prompt and output, presence and frequency the output alone."""
    counts, of_row = state.counts[rows], state.floats[rows, :, None]
    repetition = of_row[:, tables.REPETITION]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(counts != 0, repeated, x)
    output = (counts & tables.MAX_COUNT).float()
    x -= of_row[:, tables.FREQUENCY] * output
    return x - torch.where(output > 0, of_row[:, tables.PRESENCE], 0.0)


def _remember(tokens: Tensor, rows: Tensor, positions: Tensor, state: SamplingTables) -> None:
    flags = state.ints[rows, tables.FLAGS]
    members = _with(flags, tables.PENALISED)
    counted = rows[members], tokens[members]
    state.counts[counted] += (state.counts[counted] & tables.MAX_COUNT) < tables.MAX_COUNT
    members = _with(flags, tables.REMEMBERED)
    at = positions[members] % state.recent.shape[1]
    state.recent[rows[members], at] = tokens[members].int()
