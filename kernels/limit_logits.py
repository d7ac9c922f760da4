"""Top-k, top-p and min-p as a threshold on each row's logits, found without a sort.

Two rounds of 16 pivots, counted over chunks of the row by many programs, leave a narrow bracket.
What lies in it is gathered, and one program per row bisects the ordered bits of those floats.
Pivots only narrow, with a margin for the rounding of their sums; what decides are counts, and
weights `exp(x - max)` as integers of 38 binary places, whose sums have no order. A bracket that
holds more than is gathered is bisected over the whole row: slower, and as exact.

As many programs as fill the device share the chunks of those rows that have a limit; where no row
has one they leave at once.
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
# a weight has two halves of so many binary places, whose sums over a block fit int32
_HALF_BITS = tl.constexpr(tables.WEIGHT_BITS // 2)
_HALF = tl.constexpr(float(1 << (tables.WEIGHT_BITS // 2)))
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
def _halves(b_x, top):
    """The weights as two int32: units of the first half, and of the rest."""
    b_w = tl.exp(b_x - top) * _HALF
    b_high = b_w.to(tl.int32)
    return b_high, ((b_w - b_high.to(tl.float32)) * _HALF).to(tl.int32)


@triton.jit
def _weight(b_x, top):
    """int64."""
    b_high, b_low = _halves(b_x, top)
    return (b_high.to(tl.int64) << _HALF_BITS) + b_low


@triton.jit
def limited_rows(rows, floats, ints, num_rows, SEARCHED: tl.constexpr, BR: tl.constexpr):
    """`[BR]`: 1, 2, ... at the rows with a limit, 0 at the others; and their number.

    SEARCHED leaves out those of min-p alone, whose maximum is enough.
    """
    o_r = tl.arange(0, BR)
    b_row = tl.load(rows + o_r, mask=o_r < num_rows, other=-1)
    b_at = tl.maximum(b_row, 0)
    b_flags = tl.load(ints + b_at * _NUM_INTS + _FLAGS)
    b_limited = (b_row >= 0) & ((b_flags & _LIMITED) != 0)
    if SEARCHED:
        b_has_k = tl.load(ints + b_at * _NUM_INTS + _TOP_K) > 0
        b_limited &= b_has_k | (tl.load(floats + b_at * _NUM_FLOATS + _TOP_P) < 1.0)
    b_number = tl.cumsum(b_limited.to(tl.int32), 0)
    return tl.where(b_limited, b_number, 0), tl.sum(b_limited.to(tl.int32), 0)


@triton.jit
def numbered_row(b_number, number, BR: tl.constexpr):
    """int64: which of the step's rows has this number, from 0."""
    o_r = tl.arange(0, BR)
    return tl.sum(tl.where(b_number == number + 1, o_r, 0), 0).to(tl.int64)


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


@triton.jit(do_not_specialize=["num_rows"])
def pivot_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    num_rows,
    block_min,
    pivots,
    partial,
    bracket,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    NC: tl.constexpr,
    BC: tl.constexpr,
    CHUNK: tl.constexpr,
    NP: tl.constexpr,
    ROUND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum, over chunks of rows, what is not below each of 16 pivots: its number if the row has a
    top-k, else its weights. The last pivot is the floor, whose sum is the row's.

    pivots `[2, R, NP]` and partial `[2, R, NC, NP]`, of both rounds; bracket `[2, R, 2]`, the
    first is made by the second round.
    """
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    b_number, count = limited_rows(rows, floats, ints, num_rows, True, BR)
    for work in range(tl.program_id(0), count * NC, tl.num_programs(0)):
        i_r, i_c = numbered_row(b_number, work // NC, BR), work % NC
        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        # [CHUNK]
        b_x = tl.load(x + i_r * stride_x + o_v, mask=o_v < V, other=float("-inf"))
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
def _store_sums(totals, which, b_x, b_in, top, has_p, NB: tl.constexpr):
    """Count and weights of a block; the latter only where top-p asks for them."""
    tl.store(totals + which * NB, tl.sum(b_in.to(tl.int32), 0).to(tl.int64))
    if has_p:
        b_high, b_low = _halves(b_x, top)
        high = tl.sum(tl.where(b_in, b_high, 0), 0).to(tl.int64)
        low = tl.sum(tl.where(b_in, b_low, 0), 0).to(tl.int64)
        tl.store(totals + (which + 1) * NB, (high << _HALF_BITS) + low)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    num_rows,
    pivots,
    partial,
    bracket,
    num_found,
    totals,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    NC: tl.constexpr,
    BC: tl.constexpr,
    NP: tl.constexpr,
    BV: tl.constexpr,
    ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Copy what is in the bracket behind the row, in any order, ROOM at most, counting all of it.

    totals `[R, 4, NB]` int64: count and weights above the bracket, and above the floor.
    """
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    b_number, count = limited_rows(rows, floats, ints, num_rows, True, BR)
    for work in range(tl.program_id(0), count * NB, tl.num_programs(0)):
        i_r, i_b = numbered_row(b_number, work // NB, BR), work % NB
        o_v = i_b * BV + tl.arange(0, BV)
        # [BV]
        b_x = tl.load(x + i_r * stride_x + o_v, mask=o_v < V, other=float("-inf"))
        row = tl.load(rows + i_r)
        top = _row_top(block_max, i_r, NB, BN)
        floor = _row_floor(floats, row, top)
        top_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P)
        of_round = num_rows + i_r
        low, high = _narrow(
            tl.load(pivots + of_round * NP + tl.arange(0, NP)),
            _sums(partial, of_round, NC, BC, NP),
            tl.load(bracket + i_r * 2),
            tl.load(bracket + i_r * 2 + 1),
            tl.load(ints + row * _NUM_INTS + _TOP_K),
            top_p,
            NP,
        )
        if i_b == 0:
            tl.store(bracket + of_round * 2, low)
            tl.store(bracket + of_round * 2 + 1, high)
        b_key = _key(b_x)
        b_in = ((b_key >= low) & (b_key < high)).to(tl.int32)
        num = tl.sum(b_in, 0)
        if num > 0:
            b_at = tl.atomic_add(num_found + i_r, num) + tl.cumsum(b_in, 0) - 1
            tl.store(x + i_r * stride_x + V + b_at, b_x, mask=(b_in != 0) & (b_at < ROOM))
        of_block = totals + i_r * 4 * NB + i_b
        _store_sums(of_block, 0, b_x, b_key >= high, top, top_p < 1.0, NB)
        _store_sums(of_block, 2, b_x, b_x >= floor, top, top_p < 1.0, NB)


@triton.jit
def _sums_from(found, num, from_key, high, top, WEIGHTS: tl.constexpr, BS: tl.constexpr):
    """Count of the found keys in `[from_key, high)`, or their weights."""
    total = tl.zeros((), tl.int64)
    for first in range(0, num, BS):
        o_n = first + tl.arange(0, BS)
        # [BS]
        b_x = tl.load(found + o_n, mask=o_n < num, other=float("-inf"))
        b_key = _key(b_x)
        b_in = (b_key >= from_key) & (b_key < high)
        if WEIGHTS:
            total += tl.sum(tl.where(b_in, _weight(b_x, top), 0), 0)
        else:
            total += tl.sum(b_in.to(tl.int32), 0)
    return total


@triton.jit
def _sums_here(b_key, b_w, from_key, WEIGHTS: tl.constexpr):
    """As `_sums_from`, of keys in registers that are all below the end."""
    b_in = b_key >= from_key
    if WEIGHTS:
        total = tl.sum(tl.where(b_in, b_w, 0), 0)
    else:
        total = tl.sum(b_in.to(tl.int32), 0).to(tl.int64)
    return total


@triton.jit
def _bisect(
    found,
    num,
    b_key,
    b_w,
    low,
    high,
    top,
    above,
    wanted,
    HERE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BS: tl.constexpr,
):
    """The largest key from which on the sum, `above` included, is at least `wanted`.

    That is so of `low`, and not of `high`, from which on `above` is the sum.
    """
    low, past = low.to(tl.int64), high.to(tl.int64)
    while past - low > 1:
        middle = (low + past) >> 1
        if HERE:
            total = _sums_here(b_key, b_w, middle.to(tl.int32), WEIGHTS)
        else:
            total = _sums_from(found, num, middle.to(tl.int32), high, top, WEIGHTS, BS)
        reaches = (above + total).to(tl.float64) >= wanted
        low = tl.where(reaches, middle, low)
        past = tl.where(reaches, past, middle)
    return low.to(tl.int32)


@triton.jit
def _threshold(
    found,
    num,
    low,
    high,
    top,
    floor,
    totals,
    top_k,
    top_p,
    HERE: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
):
    """The smallest logit kept of a row, whose candidates are the found ones."""
    o_b = tl.arange(0, BN)
    inside = o_b < NB
    count_above = tl.sum(tl.load(totals + o_b, mask=inside, other=0), 0)
    weight_above = tl.sum(tl.load(totals + NB + o_b, mask=inside, other=0), 0)
    num_all = tl.sum(tl.load(totals + 2 * NB + o_b, mask=inside, other=0), 0)
    total = tl.sum(tl.load(totals + 3 * NB + o_b, mask=inside, other=0), 0)
    o_n = tl.arange(0, BS)
    b_x = tl.load(found + o_n, mask=o_n < num, other=float("-inf"))
    b_key, b_w = _key(b_x), _weight(b_x, top)
    if (top_k > 0) & (top_k < num_all):
        wanted = top_k.to(tl.float64)
        low = _bisect(found, num, b_key, b_w, low, high, top, count_above, wanted, HERE, False, BS)
        floor = _float_of(low)
        if HERE:
            count = _sums_here(b_key, b_w, low + 1, False)
            weight = _sums_here(b_key, b_w, low + 1, True)
        else:
            count = _sums_from(found, num, low + 1, high, top, False, BS)
            weight = _sums_from(found, num, low + 1, high, top, True, BS)
        # of those that tie for the last place, as many as have one
        ties = top_k - count_above - count
        total = weight_above + weight + ties * _weight(floor, top)
    if top_p < 1.0:
        wanted = top_p.to(tl.float64) * total.to(tl.float64)
        low = _bisect(found, num, b_key, b_w, low, high, top, weight_above, wanted, HERE, True, BS)
        floor = _float_of(low)
    return floor


@triton.jit(do_not_specialize=["num_rows"])
def threshold_kernel(
    x,
    rows,
    floats,
    ints,
    block_max,
    num_rows,
    bracket,
    num_found,
    totals,
    least,
    stride_x,
    V: tl.constexpr,
    NB: tl.constexpr,
    BN: tl.constexpr,
    ROOM: tl.constexpr,
    BS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The smallest logit that top-k, top-p and min-p keep: `least`, `[R]`."""
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i_r)
    flags = tl.load(ints + tl.maximum(row, 0) * _NUM_INTS + _FLAGS)
    if (row >= 0) & ((flags & _LIMITED) != 0):
        top = _row_top(block_max, i_r, NB, BN)
        threshold = _row_floor(floats, row, top)
        top_k = tl.load(ints + row * _NUM_INTS + _TOP_K)
        top_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P)
        if (top_k > 0) | (top_p < 1.0):
            low = tl.load(bracket + (num_rows + i_r) * 2)
            high = tl.load(bracket + (num_rows + i_r) * 2 + 1)
            of_row = totals + i_r * 4 * NB
            num = tl.load(num_found + i_r)
            # what was gathered, in registers or not, or all
            found = x + i_r * stride_x
            if num <= (BS if BS < ROOM else ROOM):
                found += V
                threshold = _threshold(
                    found, num, low, high, top, threshold, of_row, top_k, top_p, True, NB, BN, BS
                )
            else:
                fits = num <= ROOM
                found += tl.where(fits, V, 0)
                num = tl.where(fits, num, V)
                threshold = _threshold(
                    found, num, low, high, top, threshold, of_row, top_k, top_p, False, NB, BN, BS
                )
        tl.store(least + i_r, threshold)
