"""Sample a token of each row, whatever the row asks for, with nothing for the host to decide."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels import sampling_tables as tables
from diptych.kernels.adjust_logits import adjust_kernel
from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.limit_logits import (
    gather_kernel,
    limited_rows,
    numbered_row,
    pivot_kernel,
    threshold_kernel,
)
from diptych.kernels.sampling_tables import SamplingTables
from diptych.kernels.triton_noise import gumbel_noise

BLOCK = 2048
CHUNK = 4096
PIVOTS = 16
# logits of a row that are bisected apart from it
ROOM = 8192
IN_REGISTERS = 2048
# programs that share the rows with a limit: a few for each multiprocessor
PROGRAMS = 396
# of a thread of those, so that as many fit
_REGISTERS = 80
# rows that share a workspace of 0.6 MB each
GROUP = 256

_NUM_INTS = tl.constexpr(tables.NUM_INTS)
_FLAGS = tl.constexpr(tables.FLAGS)
_PENALISED = tl.constexpr(tables.PENALISED)
_MAX_COUNT = tl.constexpr(tables.MAX_COUNT)
_REMEMBERED = tl.constexpr(tables.REMEMBERED)


@triton.jit(do_not_specialize=["num_rows"])
def _limited_kernel(
    x,
    least,
    rows,
    positions,
    floats,
    ints,
    num_rows,
    block_max,
    block_token,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sample each block of the rows with a limit among what is not below it."""
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    b_number, count = limited_rows(rows, floats, ints, num_rows, False, BR)
    for work in range(tl.program_id(0), count * NB, tl.num_programs(0)):
        i_r, i_b = numbered_row(b_number, work // NB, BR), work % NB
        row = tl.load(rows + i_r)
        threshold = tl.load(least + i_r)
        best = float("-inf")
        at = 0
        if tl.load(block_max + i_r * NB + i_b) >= threshold:
            o_v = i_b * BV + tl.arange(0, BV)
            # [BV]
            b_x = tl.load(x + i_r * stride_x + o_v, mask=o_v < V, other=float("-inf"))
            noise = gumbel_noise(tl.load(ints + row * _NUM_INTS), tl.load(positions + i_r), o_v)
            b_x = tl.where(b_x >= threshold, b_x + noise, float("-inf"))
            best, at = tl.max(b_x, 0, return_indices=True)
        tl.store(block_max + i_r * NB + i_b, best)
        tl.store(block_token + i_r * NB + i_b, i_b * BV + at)


@triton.jit
def _choose_kernel(
    out,
    rows,
    positions,
    ints,
    counts,
    recent,
    block_max,
    block_token,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The best of each row's blocks; the row counts and remembers it if it needs to."""
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i_r)
    token = tl.zeros((), tl.int64)
    if row >= 0:
        o_b = tl.arange(0, BN)
        # [BN]
        b_max = tl.load(block_max + i_r * NB + o_b, mask=o_b < NB, other=float("-inf"))
        _, at = tl.max(b_max, 0, return_indices=True)
        token = tl.load(block_token + i_r * NB + at).to(tl.int64)
        flags = tl.load(ints + row * _NUM_INTS + _FLAGS)
        if flags & _PENALISED:
            count = tl.load(counts + row * V + token)
            more = (count.to(tl.int32) & _MAX_COUNT) < _MAX_COUNT
            tl.store(counts + row * V + token, count + more.to(tl.int16))
        if flags & _REMEMBERED:
            tl.store(recent + row * H + tl.load(positions + i_r) % H, token.to(tl.int32))
    tl.store(out + i_r, token)


def sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingTables, limits: bool = True
) -> Tensor:
    """Sample each row by its part of the tables, which then know the token.

    Arguments and result as in `torch_sampling.sample_rows`, every last axis contiguous. No value on
    the device decides a launch.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == rows.stride(0) == positions.stride(0) == 1
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    width = triton.cdiv(vocab + ROOM, 16) * 16 if limits else 1
    x = torch.empty(min(num_rows, GROUP), width, device=logits.device)
    for start in range(0, num_rows, GROUP):
        part = slice(start, start + GROUP)
        _sample(logits[part], rows[part], positions[part], state, limits, x, out[part])
    return out


def _sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingTables,
    limits: bool,
    x: Tensor,
    out: Tensor,
) -> None:
    """As `sample_rows`, of at most as many rows as the workspace `x` has."""
    num_rows, vocab = logits.shape
    device = logits.device
    blocks = triton.cdiv(vocab, BLOCK)
    grid = (blocks, num_rows)
    block_max, block_min = torch.empty(2, num_rows, blocks, device=device)
    block_token = torch.empty(num_rows, blocks, dtype=torch.int32, device=device)
    num_found = torch.empty(num_rows, dtype=torch.int32, device=device)
    sizes = {"V": vocab, "NB": blocks}
    kept, early = {"H": state.recent.shape[1]}, early_start(device)
    adjust_kernel[grid](
        logits,
        rows,
        positions,
        state.floats,
        state.ints,
        state.counts,
        state.allowed,
        state.edits,
        state.prefixes,
        state.recent,
        x,
        block_max,
        block_min,
        block_token,
        num_found,
        logits.stride(0),
        x.stride(0),
        **sizes,
        **kept,
        E=state.edits.shape[2],
        W=state.prefixes.shape[1],
        BV=BLOCK,
        LIMITS=limits,
        num_warps=8,
        **early,
    )
    if limits:
        least = _find_thresholds(x, rows, state, block_max, block_min, num_found, vocab)
        _limited_kernel[(min(PROGRAMS, num_rows * blocks),)](
            x,
            least,
            rows,
            positions,
            state.floats,
            state.ints,
            num_rows,
            block_max,
            block_token,
            x.stride(0),
            **sizes,
            BR=GROUP,
            BV=BLOCK,
            num_warps=8,
            **early,
        )
    _choose_kernel[(num_rows,)](
        out,
        rows,
        positions,
        state.ints,
        state.counts,
        state.recent,
        block_max,
        block_token,
        **sizes,
        **kept,
        BN=triton.next_power_of_2(blocks),
        num_warps=1,
        **early,
    )


def _find_thresholds(
    x: Tensor,
    rows: Tensor,
    state: SamplingTables,
    block_max: Tensor,
    block_min: Tensor,
    num_found: Tensor,
    vocab: int,
) -> Tensor:
    """`[R]` float32: the smallest logit kept of each row that has a limit."""
    (num_rows, blocks), device = block_max.shape, x.device
    chunks = triton.cdiv(vocab, CHUNK)
    pivots = torch.empty(2, num_rows, PIVOTS, device=device)
    partial = torch.empty(2, num_rows, chunks, PIVOTS, device=device)
    bracket = torch.empty(2, num_rows, 2, dtype=torch.int32, device=device)
    totals = torch.empty(num_rows, 4, blocks, dtype=torch.int64, device=device)
    least = torch.empty(num_rows, device=device)
    of_rows = (x, rows, state.floats, state.ints, block_max, num_rows)
    sizes = {"V": vocab, "NB": blocks, "BN": triton.next_power_of_2(blocks)}
    options = {"num_warps": 8, **early_start(device)}
    shared = {**options, "maxnreg": _REGISTERS}
    pivoted = {"NC": chunks, "BC": triton.next_power_of_2(chunks), "NP": PIVOTS, "BR": GROUP}
    for turn in range(2):
        pivot_kernel[(min(PROGRAMS, num_rows * chunks),)](
            *of_rows,
            block_min,
            pivots,
            partial,
            bracket,
            x.stride(0),
            **sizes,
            **pivoted,
            CHUNK=CHUNK,
            ROUND=turn,
            **shared,
        )
    gather_kernel[(min(PROGRAMS, num_rows * blocks),)](
        *of_rows,
        pivots,
        partial,
        bracket,
        num_found,
        totals,
        x.stride(0),
        **sizes,
        **pivoted,
        BV=BLOCK,
        ROOM=ROOM,
        **shared,
    )
    threshold_kernel[(num_rows,)](
        *of_rows,
        bracket,
        num_found,
        totals,
        least,
        x.stride(0),
        **sizes,
        ROOM=ROOM,
        BS=IN_REGISTERS,
        **options,
    )
    return least
