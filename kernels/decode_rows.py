"""The rows of requests around a decode step: read before it, moved on after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.row_inputs import RowInputs

# rows of a program, and block-table entries copied at one time
ROWS = 128
ENTRIES = 256


@triton.jit(do_not_specialize=["stride_table", "stride_out", "width"])
def _read_kernel(
    order,
    last_tokens,
    positions,
    prompt_lens,
    block_tables,
    out_ids,
    out_positions,
    out_slots,
    out_outputs,
    out_lens,
    out_tables,
    stride_table,
    stride_out,
    width,
    BS: tl.constexpr,
    BN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_r = tl.program_id(0).to(tl.int64)
    row = tl.load(order + i_r)
    if row < 0:
        tl.store(out_ids + i_r, 0)
        tl.store(out_positions + i_r, 0)
        tl.store(out_slots + i_r, -1)
        tl.store(out_outputs + i_r, 0)
        tl.store(out_lens + i_r, 0)
        return
    position = tl.load(positions + row)
    block = tl.load(block_tables + row * stride_table + position // BS).to(tl.int64)
    tl.store(out_ids + i_r, tl.load(last_tokens + row))
    tl.store(out_positions + i_r, position)
    tl.store(out_slots + i_r, block * BS + position % BS)
    tl.store(out_outputs + i_r, position + 1 - tl.load(prompt_lens + row))
    tl.store(out_lens + i_r, (position + 1).to(tl.int32))
    # no more than the sequence has
    end = tl.minimum(position // BS + 1, width).to(tl.int32)
    for start in range(0, end, BN):
        # [BN]
        o_n = start + tl.arange(0, BN)
        b_table = tl.load(block_tables + row * stride_table + o_n, mask=o_n < end, other=0)
        tl.store(out_tables + i_r * stride_out + o_n, b_table, mask=o_n < end)


@triton.jit(do_not_specialize=["count"])
def _advance_kernel(
    order,
    sampled,
    last_tokens,
    positions,
    tokens,
    count,
    BN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    # [BN]
    o_r = tl.program_id(0) * BN + tl.arange(0, BN)
    m_r = o_r < count
    b_row = tl.load(order + o_r, mask=m_r, other=-1)
    b_token = tl.load(sampled + o_r, mask=m_r, other=0)
    tl.store(tokens + o_r, b_token, mask=m_r)
    m_row = b_row >= 0
    b_position = tl.load(positions + b_row, mask=m_row, other=0)
    tl.store(last_tokens + b_row, b_token, mask=m_row)
    tl.store(positions + b_row, b_position + 1, mask=m_row)


@triton.jit(do_not_specialize=["count"])
def _write_kernel(
    rows,
    new_tokens,
    new_positions,
    new_prompt_lens,
    last_tokens,
    positions,
    prompt_lens,
    count,
    BN: tl.constexpr,
):
    # [BN]
    o_r = tl.program_id(0) * BN + tl.arange(0, BN)
    m_r = o_r < count
    b_row = tl.load(rows + o_r, mask=m_r, other=0)
    b_token = tl.load(new_tokens + o_r, mask=m_r, other=-1)
    tl.store(last_tokens + b_row, b_token, mask=m_r & (b_token >= 0))
    tl.store(positions + b_row, tl.load(new_positions + o_r, mask=m_r), mask=m_r)
    tl.store(prompt_lens + b_row, tl.load(new_prompt_lens + o_r, mask=m_r), mask=m_r)


def read_rows(
    order: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    prompt_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    width: int,
) -> RowInputs:
    """The inputs of a decode step. Arguments as in `reference.read_rows`."""
    assert block_tables.stride(1) == 1
    count, device = len(order), order.device
    ids, at, slots, outputs = (
        torch.empty(count, dtype=torch.int64, device=device) for _ in range(4)
    )
    lens = torch.empty(count, dtype=torch.int32, device=device)
    tables = torch.empty(count, width, dtype=torch.int32, device=device)
    if count:
        _read_kernel[(count,)](
            order,
            last_tokens,
            positions,
            prompt_lens,
            block_tables,
            ids,
            at,
            slots,
            outputs,
            lens,
            tables,
            block_tables.stride(0),
            tables.stride(0),
            width,
            BS=block_size,
            BN=ENTRIES,
            num_warps=2,
            **early_start(order.device),
        )
    return RowInputs(ids, at, slots, outputs, lens, tables)


def advance_rows(
    order: Tensor, sampled: Tensor, last_tokens: Tensor, positions: Tensor, tokens: Tensor
) -> None:
    """Move rows on by the tokens sampled. Arguments as in `reference.advance_rows`."""
    count = len(order)
    if count:
        _advance_kernel[(triton.cdiv(count, ROWS),)](
            order,
            sampled,
            last_tokens,
            positions,
            tokens,
            count,
            BN=ROWS,
            num_warps=4,
            **early_start(order.device),
        )


def write_rows(
    rows: Tensor,
    new_tokens: Tensor,
    new_positions: Tensor,
    new_prompt_lens: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    prompt_lens: Tensor,
) -> None:
    """Bring rows up to date. Arguments as in `reference.write_rows`."""
    count = len(rows)
    if count:
        _write_kernel[(triton.cdiv(count, ROWS),)](
            rows,
            new_tokens,
            new_positions,
            new_prompt_lens,
            last_tokens,
            positions,
            prompt_lens,
            count,
            BN=ROWS,
            num_warps=4,
        )
