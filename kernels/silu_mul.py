"""The gated activation of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _silu_mul_kernel(x, out, stride_x, N, BN: tl.constexpr):
    i_t, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    mask = o_n < N
    # [BN]
    b_gate = tl.load(x + i_t * stride_x + o_n, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(x + i_t * stride_x + N + o_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + i_t * N + o_n, b_gate / (1.0 + tl.exp(-b_gate)) * b_up, mask=mask)


def silu_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` for x = `[T, 2N]` = (gate, up), last axis contiguous; returns `[T, N]`."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(2048, triton.next_power_of_2(size))
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        x, out, x.stride(0), size, BN=block, num_warps=8 if block > 1024 else 4
    )
    return out
