"""Top-k, top-p and min-p as a threshold on each row's logits, found without a sort.

Two rounds of 16 pivots, counted over chunks of the row by many programs, leave a narrow bracket.
What lies in it is gathered, and one program per row bisects the ordered bits of those floats.
Pivots only narrow, with a margin for the rounding of their sums; what decides are counts, and
weights `exp(x - max)` as integers of 40 binary places, whose sums have no order. A bracket that
holds more than is gathered is bisected over the whole row: slower, and as exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.kernels import sampling_tables as tables
from diptych.kernels.early_start import let_next_kernel_start, wait_for_earlier_kernels

_NUM_FLOATS = tl.constexpr(tables.NUM_FLOATS)
_NUM_INTS = tl.constexpr(tables.NUM_INTS)
_TOP_K = tl.constexpr(tables.TOP_K)
_TOP_P = tl.constexpr(tables.TOP_P)
_LOG_MIN_P = tl.constexpr(tables.LOG_MIN_P)
_FLAGS = tl.constexpr(tables.FLAGS)
_LIMITED = tl.constexpr(tables.LIMITED)
_LARGEST = tl.constexpr(tables.LARGEST)
_UNITS = tl.constexpr(float(1 << 40))
# relative, of sums of float32
_MARGIN = tl.constexpr(1e-4)
# below the maximum the first pivots reach so far
_REACH = tl.constexpr(20.0)
# above the key of every float
_NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def _key(x):
    """int32 ordered as the floats are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(b_x, top):
    """int64."""
    return (tl.exp(b_x - top) * _UNITS).to(tl.int64)


@triton.jit
def _is_limited(rows, ints, i_r):
    row = tl.load(rows + i_r)
    flags = tl.load(ints + tl.maximum(row, 0) * _NUM_INTS + _FLAGS)
    return (row >= 0) & ((flags & _LIMITED) != 0)


@triton.jit
def _is_searched(rows, floats, ints, i_r):
    """Whether top-k or top-p limits the row; for min-p its maximum is enough."""
    row = tl.maximum(tl.load(rows + i_r), 0)
    has_k = tl.load(ints + row * _NUM_INTS + _TOP_K) > 0
    has_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P) < 1.0
    return _is_limited(rows, ints, i_r) & (has_k | has_p)


@triton.jit
def _row_top(block_max, i_r, NB: tl.constexpr, BN: tl.constexpr):
    o_b = tl.arange(0, BN)
    b_max = tl.load(block_max + i_r * NB + o_b, mask=o_b < NB, other=-_LARGEST)
    return tl.maximum(tl.max(b_max, 0), -_LARGEST)


@triton.jit
def _row_floor(floats, row, top):
    """The least logit that min-p keeps; masked tokens are below it."""
    return tl.maximum(top + tl.load(floats + row * _NUM_FLOATS + _LOG_MIN_P), -_LARGEST)


@triton.jit
def _sums(partial, i_r, NC: tl.constexpr, BC: tl.constexpr, NP: tl.constexpr):
    """`[NP]`, over all chunks."""
    o_c, o_p = tl.arange(0, BC)[:, None], tl.arange(0, NP)[None, :]
    at = partial + (i_r * NC + o_c) * NP + o_p
    return tl.sum(tl.load(at, mask=o_c < NC, other=0.0), 0)


@triton.jit
def _narrow(b_pivot, b_sum, low, high, top_k, top_p, NP: tl.constexpr):
    """A bracket of keys `[low, high)` that still has both thresholds.

    Where there is a top-k the sums are counts, which say nothing of where top-p ends.
    """
    o_p = tl.arange(0, NP)
    wanted = top_p * tl.sum(tl.where(o_p == NP - 1, b_sum, 0.0), 0)
    by_k = top_k > 0
    b_reaches = b_sum >= tl.where(by_k, top_k, wanted * (1.0 + _MARGIN))
    b_misses = b_sum < tl.where(by_k, top_k, wanted * (1.0 - _MARGIN))
    b_misses &= ~by_k | (top_p >= 1.0)
    b_key = _key(b_pivot)
    low = tl.maximum(low, tl.max(tl.where(b_reaches, b_key, low), 0))
    high = tl.minimum(high, tl.min(tl.where(b_misses, b_key, high), 0))
    return low, high


@triton.jit
def pivot_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    block_min,
    pivots,
    partial,
    bracket,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    NC: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    NP: tl.constexpr,
    ROUND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum, over one chunk of a row, what is not below each of 16 pivots: its number if the row has
    a top-k, else its weights. The last pivot is the floor, whose sum is the row's.

    pivots `[2, R, NP]` and partial `[2, R, NC, NP]`, of both rounds; bracket `[2, R, 2]`, the
    first is made by the second round.
    """
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_c, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(1)
    if _is_searched(rows, floats, ints, i_r):
        row = tl.load(rows + i_r)
        top_k = tl.load(ints + row * _NUM_INTS + _TOP_K)
        top = _row_top(block_max, i_r, NB, BN)
        floor = _row_floor(floats, row, top)
        if ROUND == 0:
            o_b = tl.arange(0, BN)
            b_min = tl.load(block_min + i_r * NB + o_b, mask=o_b < NB, other=float("inf"))
            start = top
            end = tl.minimum(tl.maximum(tl.maximum(tl.min(b_min, 0), floor), top - _REACH), top)
        else:
            b_sum = _sums(partial, i_r, NC, BC, NP)
            b_old = tl.load(pivots + i_r * NP + tl.arange(0, NP))
            top_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P)
            low, high = _narrow(b_old, b_sum, _key(floor), _NO_KEY, top_k, top_p, NP)
            start, end = _float_of(tl.minimum(high, _key(top))), _float_of(low)
            if i_c == 0:
                tl.store(bracket + i_r * 2, low)
                tl.store(bracket + i_r * 2 + 1, high)
        of_round = ROUND * num_rows + i_r
        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        # [CHUNK]
        b_x = tl.load(x + i_r * stride_x + o_v, mask=o_v < V, other=float("-inf"))
        b_w = tl.where(top_k > 0, 1.0, tl.exp(b_x - top))
        at = partial + (of_round * NC + i_c) * NP
        for j in tl.static_range(NP):
            pivot = start - (start - end) * ((j + 1) / NP)
            if j == NP - 1:
                pivot = floor
            if i_c == 0:
                tl.store(pivots + of_round * NP + j, pivot)
            tl.store(at + j, tl.sum(tl.where(b_x >= pivot, b_w, 0.0), 0))


@triton.jit
def gather_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    pivots,
    partial,
    bracket,
    num_found,
    totals,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    NC: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    NP: tl.constexpr,
    ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Copy what is in the bracket behind the row, in any order, ROOM at most, counting all of it.

    totals `[R, 4, NC]` int64: count and weights above the bracket, and above the floor.
    """
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_c, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(1)
    if _is_searched(rows, floats, ints, i_r):
        row = tl.load(rows + i_r)
        top = _row_top(block_max, i_r, NB, BN)
        floor = _row_floor(floats, row, top)
        of_round = num_rows + i_r
        low, high = _narrow(
            tl.load(pivots + of_round * NP + tl.arange(0, NP)),
            _sums(partial, of_round, NC, BC, NP),
            tl.load(bracket + i_r * 2),
            tl.load(bracket + i_r * 2 + 1),
            tl.load(ints + row * _NUM_INTS + _TOP_K),
            tl.load(floats + row * _NUM_FLOATS + _TOP_P),
            NP,
        )
        if i_c == 0:
            tl.store(bracket + of_round * 2, low)
            tl.store(bracket + of_round * 2 + 1, high)
        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        # [CHUNK]
        b_x = tl.load(x + i_r * stride_x + o_v, mask=o_v < V, other=float("-inf"))
        b_key = _key(b_x)
        b_w = _weight(b_x, top)
        b_in = ((b_key >= low) & (b_key < high)).to(tl.int32)
        count = tl.sum(b_in, 0)
        if count > 0:
            start = tl.atomic_add(num_found + i_r, count)
            b_at = start + tl.cumsum(b_in, 0) - 1
            tl.store(x + i_r * stride_x + V + b_at, b_x, mask=(b_in != 0) & (b_at < ROOM))
        at = totals + i_r * 4 * NC + i_c
        b_above, b_kept = b_key >= high, b_x >= floor
        tl.store(at, tl.sum(b_above.to(tl.int32), 0).to(tl.int64))
        tl.store(at + NC, tl.sum(tl.where(b_above, b_w, 0), 0))
        tl.store(at + 2 * NC, tl.sum(b_kept.to(tl.int32), 0).to(tl.int64))
        tl.store(at + 3 * NC, tl.sum(tl.where(b_kept, b_w, 0), 0))


@triton.jit
def _sums_from(found, num, from_key, high, top, BS: tl.constexpr):
    """Count and weights of the found keys in `[from_key, high)`."""
    count = tl.zeros((), tl.int64)
    weight = tl.zeros((), tl.int64)
    for first in range(0, num, BS):
        o_n = first + tl.arange(0, BS)
        # [BS]
        b_x = tl.load(found + o_n, mask=o_n < num, other=float("-inf"))
        b_key = _key(b_x)
        b_in = (o_n < num) & (b_key >= from_key) & (b_key < high)
        count += tl.sum(b_in.to(tl.int64), 0)
        weight += tl.sum(tl.where(b_in, _weight(b_x, top), 0), 0)
    return count, weight


@triton.jit
def _bisect(found, num, low, high, top, above, wanted, BY_K: tl.constexpr, BS: tl.constexpr):
    """The largest key from which on the sum, `above` included, is at least `wanted`.

    That is so of `low`, and not of `high`, from which on `above` is the sum.
    """
    end = high
    low, past = low.to(tl.int64), high.to(tl.int64)
    while past - low > 1:
        middle = (low + past) >> 1
        count, weight = _sums_from(found, num, middle.to(tl.int32), end, top, BS)
        total = above + (count if BY_K else weight)
        reaches = total.to(tl.float64) >= wanted
        low = tl.where(reaches, middle, low)
        past = tl.where(reaches, past, middle)
    return low


@triton.jit
def threshold_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    bracket,
    num_found,
    totals,
    least,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    NC: tl.constexpr,
    BC: tl.constexpr,
    ROOM: tl.constexpr,
    BS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The smallest logit that top-k, top-p and min-p keep: `least`, `[R]`."""
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_r = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    if _is_limited(rows, ints, i_r):
        row = tl.load(rows + i_r)
        top = _row_top(block_max, i_r, NB, BN)
        threshold = _row_floor(floats, row, top)
        low = tl.load(bracket + (num_rows + i_r) * 2)
        high = tl.load(bracket + (num_rows + i_r) * 2 + 1)
        o_c = tl.arange(0, BC)
        at, inside = totals + i_r * 4 * NC + o_c, o_c < NC
        count_above = tl.sum(tl.load(at, mask=inside, other=0), 0)
        weight_above = tl.sum(tl.load(at + NC, mask=inside, other=0), 0)
        num_all = tl.sum(tl.load(at + 2 * NC, mask=inside, other=0), 0)
        total = tl.sum(tl.load(at + 3 * NC, mask=inside, other=0), 0)
        # what was gathered, or all
        num = tl.load(num_found + i_r)
        fits = num <= ROOM
        found = x + i_r * stride_x + tl.where(fits, V, 0)
        num = tl.where(fits, num, V)
        top_k = tl.load(ints + row * _NUM_INTS + _TOP_K)
        top_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P)
        low = low.to(tl.int64)
        if (top_k > 0) & (top_k < num_all):
            wanted = top_k.to(tl.float64)
            low = _bisect(found, num, low, high, top, count_above, wanted, True, BS)
            threshold = _float_of(low.to(tl.int32))
            count, weight = _sums_from(found, num, low.to(tl.int32) + 1, high, top, BS)
            # of those that tie for the last place, as many as have one
            ties = top_k - count_above - count
            total = weight_above + weight + ties * _weight(threshold, top)
        if top_p < 1.0:
            wanted = top_p.to(tl.float64) * total.to(tl.float64)
            low = _bisect(found, num, low, high, top, weight_above, wanted, False, BS)
            threshold = _float_of(low.to(tl.int32))
        tl.store(least + i_r, threshold)
