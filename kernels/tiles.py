"""What attention kernels share: where a tile's keys lie, their type, the running softmax."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def slot_offsets(
    block_table, start, limit, stride_block, stride_slot, BS: tl.constexpr, BN: tl.constexpr
):
    """Offsets in a cache of the BN tokens from `start` on; from `limit` on they mean nothing.

    A tile within one page needs one page id; else each token looks its own up.
    """
    # [BN]
    o_n = start + tl.arange(0, BN)
    if BS % BN == 0:
        i_block = tl.load(block_table + start // BS).to(tl.int64)
    else:
        i_block = tl.load(block_table + o_n // BS, mask=o_n < limit, other=0).to(tl.int64)
    return i_block * stride_block + (o_n % BS).to(tl.int64) * stride_slot


@triton.jit
def query_type(b_q, FAST: tl.constexpr):
    """Queries as they are multiplied: in float16 for FAST (`widened`), else in their own type."""
    if FAST:
        b_q = tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return b_q


@triton.jit
def widened(b_x, b_q, FAST: tl.constexpr):
    """Keys or values in the type of the queries; FAST: e4m3 to float16, an instruction a pair.

    The instruction is said to have effects: else the compiler moves it behind the transposition for
    the matrix unit, and that goes byte by byte.
    """
    if FAST:
        b_y = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [b_x],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        b_y = b_x.to(b_q.dtype)
    return b_y


@triton.jit
def online_softmax(b_s, b_m, b_l, scale_log2):
    """Take the scores of one more tile into a running softmax in powers of two.

    `b_s` and the running maximum `b_m` are not scaled yet: `b_s * scale - base` is one instruction.

    Returns:
        The tile's weights, the factor for what was summed before, the new maximum and sum.
    """
    b_max = tl.maximum(b_m, tl.max(b_s, 1))
    # a row that has seen no key yet stays at zero instead of NaN
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max * scale_log2)
    # [BM, BN]
    b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
    b_factor = tl.exp2(b_m * scale_log2 - b_base)
    return b_p, b_factor, b_max, b_l * b_factor + tl.sum(b_p, 1)


def converts_fast(q: Tensor, cache: Tensor) -> bool:
    """FAST of `widened`: for 16-bit queries over e4m3, where the device is found to convert it."""
    is_e4m3 = cache.dtype == torch.float8_e4m3fn and q.dtype != torch.float32
    return is_e4m3 and converts_e4m3(q.device)


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether it has the instruction, and gives what torch gives for every code."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    codes = torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn)
    halves = torch.empty(256, dtype=torch.float16, device=device)
    _convert_kernel[(1,)](codes, halves, N=256)
    return torch.allclose(halves, codes.half(), rtol=0.0, atol=0.0, equal_nan=True)


@triton.jit
def _convert_kernel(codes, halves, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(codes + o_n)
    tl.store(halves + o_n, widened(b_x, b_x, True))
