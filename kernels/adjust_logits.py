"""Constraints, penalties and temperature in one pass over the logits; what is sampled without a
limit is sampled in the same pass."""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels import sampling_tables as tables
from diptych.kernels.early_start import let_next_kernel_start, wait_for_earlier_kernels
from diptych.kernels.triton_noise import gumbel_noise

_NUM_FLOATS = tl.constexpr(tables.NUM_FLOATS)
_NUM_INTS = tl.constexpr(tables.NUM_INTS)
_FLAGS = tl.constexpr(tables.FLAGS)
_NUM_EDITS = tl.constexpr(tables.NUM_EDITS)
_PRESENCE = tl.constexpr(tables.PRESENCE)
_FREQUENCY = tl.constexpr(tables.FREQUENCY)
_REPETITION = tl.constexpr(tables.REPETITION)
_ALLOWED = tl.constexpr(tables.ALLOWED)
_EDITED = tl.constexpr(tables.EDITED)
_PENALISED = tl.constexpr(tables.PENALISED)
_LIMITED = tl.constexpr(tables.LIMITED)
_MAX_COUNT = tl.constexpr(tables.MAX_COUNT)
_LARGEST = tl.constexpr(tables.LARGEST)


@triton.jit
def _is_preceded(prefix, prefixes, recent, position, H: tl.constexpr):
    """Whether the output ends with a prefix; both pointers are to the row's part."""
    start, length = prefix // 256, prefix % 256
    at = tl.maximum(position, length) - length
    matches = position >= length
    for i in range(0, length):
        matches &= tl.load(recent + (at + i) % H) == tl.load(prefixes + start + i)
    return matches


@triton.jit
def _edit(
    b_x,
    o_v,
    first,
    edits,
    prefixes,
    recent,
    position,
    num_edits,
    E: tl.constexpr,
    H: tl.constexpr,
    BV: tl.constexpr,
):
    """Add what the row's edits say to these of its logits, those from token `first` on."""
    o_e = tl.arange(0, E)
    # [E], ascending
    b_token = tl.load(edits + o_e, mask=o_e < num_edits, other=2147483647)
    start = tl.sum((b_token < first).to(tl.int32), 0)
    end = tl.sum((b_token < first + BV).to(tl.int32), 0)
    for e in range(start, end):
        bias = tl.load(edits + E + e).to(tl.float32, bitcast=True)
        applies = position < tl.load(edits + 2 * E + e)
        applies &= _is_preceded(tl.load(edits + 3 * E + e), prefixes, recent, position, H)
        b_x = tl.where((o_v == tl.load(edits + e)) & applies, b_x + bias, b_x)
    return b_x


@triton.jit
def _penalise(b_x, b_count, presence, frequency, repetition):
    """Repetition counts prompt and output, presence and frequency the output alone."""
    zeros = tl.zeros_like(b_x)
    b_repeated = tl.where(b_x > 0, tl.div_rn(b_x, repetition + zeros), b_x * repetition)
    b_x = tl.where(b_count != 0, b_repeated, b_x)
    b_output = (b_count.to(tl.int32) & _MAX_COUNT).to(tl.float32)
    b_x -= frequency * b_output
    return b_x - tl.where(b_output > 0, presence, 0.0)


@triton.jit
def adjust_kernel(
    logits,
    rows,
    positions,
    floats,
    ints,
    counts,
    allowed,
    edits,
    prefixes,
    recent,
    x,
    block_max,
    block_min,
    block_token,
    num_found,
    stride_logits,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    BV: tl.constexpr,
    LIMITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows with a limit go to `x`, with the largest and least of each block, `[R, NB]`; of the
    others each block's sample goes to `block_max` and `block_token`."""
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_b * BV + tl.arange(0, BV)
    inside = o_v < V
    # [BV], on its way while the row is looked up
    b_logit = tl.load(logits + i_r * stride_logits + o_v, mask=inside, other=float("-inf"))
    row = tl.load(rows + i_r)
    position = tl.load(positions + i_r)
    if row >= 0:
        flags = tl.load(ints + row * _NUM_INTS + _FLAGS)
        seed = tl.load(ints + row * _NUM_INTS)
        temperature = tl.load(floats + row * _NUM_FLOATS)
        b_x = b_logit.to(tl.float32)
        # NaN is never sampled
        b_x = tl.where(b_x == b_x, b_x, float("-inf"))
        if flags & _ALLOWED:
            words = allowed + row * ((V + 31) // 32)
            b_word = tl.load(words + o_v // 32, mask=inside, other=0)
            b_x = tl.where(((b_word >> (o_v % 32)) & 1) != 0, b_x, float("-inf"))
        if flags & _EDITED:
            b_x = _edit(
                b_x,
                o_v,
                i_b * BV,
                edits + row * (4 * E),
                prefixes + row * W,
                recent + row * H,
                position,
                tl.load(ints + row * _NUM_INTS + _NUM_EDITS),
                E,
                H,
                BV,
            )
        if flags & _PENALISED:
            of_row = floats + row * _NUM_FLOATS
            b_count = tl.load(counts + row * V + o_v, mask=inside, other=0)
            b_x = _penalise(
                b_x,
                b_count,
                tl.load(of_row + _PRESENCE),
                tl.load(of_row + _FREQUENCY),
                tl.load(of_row + _REPETITION),
            )
        if (temperature > 0.0) & (temperature != 1.0):
            b_x = tl.div_rn(b_x, temperature + tl.zeros((BV,), tl.float32))
        if LIMITS and (flags & _LIMITED):
            # finite above, and one zero
            b_x = tl.minimum(b_x, _LARGEST)
            b_x = tl.where(b_x == 0.0, 0.0, b_x)
            tl.store(x + i_r * stride_x + o_v, b_x, mask=inside)
            tl.store(block_max + i_r * NB + i_b, tl.max(b_x, 0))
            least = tl.min(tl.where(b_x == float("-inf"), float("inf"), b_x), 0)
            tl.store(block_min + i_r * NB + i_b, least)
            if i_b == 0:
                tl.store(num_found + i_r, 0)
        else:
            if temperature > 0.0:
                b_x += gumbel_noise(seed, position, o_v)
            best, at = tl.max(b_x, 0, return_indices=True)
            tl.store(block_max + i_r * NB + i_b, best)
            tl.store(block_token + i_r * NB + i_b, i_b * BV + at)
