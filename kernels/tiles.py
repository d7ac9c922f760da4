"""What the two attention kernels share: where a tile's keys lie, and the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


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
