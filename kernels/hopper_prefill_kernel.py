"""The kernel of `hopper_prefill_attention`: one warp loads, two groups of four warps attend.

Written in Gluon, so that matrix instructions run while a softmax is computed. The loader brings
pages of the cache by the bulk copy engine into two rings of tiles, keys and values, from the last
tile to the first. Each group owns half of a program's queries. For tile i it starts the scores of i
and the weighted values of i - 1, computes the softmax of i while the latter are summed, and passes
on the matrix unit to the other group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _find_sequence(query_start_loc, i_block, num_seqs, BQ: gl.constexpr):
    """The sequence of a block of queries; sequence i starts at block `start // BQ + i`."""
    low = gl.to_tensor(0)
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = gl.load(query_start_loc + middle) // BQ + middle
        low, high = (
            gl.where(first_block <= i_block, middle + 1, low),
            gl.where(first_block <= i_block, high, middle),
        )
    return low - 1


@gluon.jit
def _load_tile(
    rows, ring, ready, free, i, i_tile, p_table, last_page, head_row, page_rows,
    BS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring tile `i_tile` of a sequence, the i-th that passes through the ring."""
    stage = i % STAGES
    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BN * D * 2)
    for part in gl.static_range(BN // BS):
        # past the sequence's end its last page is read again, so that no other is
        page = gl.load(p_table + gl.minimum(i_tile * (BN // BS) + part, last_page))
        tma.async_copy_global_to_shared(
            rows,
            [page * page_rows + head_row, 0],
            ready.index(stage),
            ring.index(stage).slice(part * BS, BS),
        )


@gluon.jit
def _load(
    q_rows, k_rows, v_rows, q_tile, k_ring, v_ring,
    q_ready, k_ready, k_free, v_ready, v_free,
    q_row, q_column, p_table, tiles, last_page, head_row, page_rows,
    BS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, GQ: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loader: queries, then tiles of keys and values from the last one to the first."""
    mbarrier.expect(q_ready, 2 * GQ * D * 2)
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_rows, [q_row + group * GQ, q_column], q_ready, q_tile.index(group)
        )
    for i in range(tiles):
        i_tile = tiles - 1 - i
        _load_tile(
            k_rows, k_ring, k_ready, k_free, i, i_tile, p_table, last_page, head_row, page_rows,
            BS, BN, D, STAGES,
        )  # fmt: skip
        _load_tile(
            v_rows, v_ring, v_ready, v_free, i, i_tile, p_table, last_page, head_row, page_rows,
            BS, BN, D, STAGES,
        )  # fmt: skip


@gluon.jit
def _start_scores(q, k, BN: gl.constexpr, GQ: gl.constexpr, S: gl.constexpr):
    b_zero = gl.zeros([GQ, BN], gl.float32, S)
    return warpgroup_mma(q, k.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    b_s, b_m, b_l, o_position, start, scale_log2,
    BN: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As `tiles.online_softmax`, over the keys `start..` that a query may see."""
    if MASKED:
        o_n = start + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
        b_s = gl.where(o_n[None, :] <= o_position[:, None], b_s, float("-inf"))
    b_max = gl.maximum(b_m, gl.max(b_s, 1))
    b_base = b_max * scale_log2
    if MASKED:
        # a row that has seen no key yet stays at zero instead of NaN
        b_base = gl.where(b_max == float("-inf"), 0.0, b_base)
    b_p = gl.exp2(b_s * scale_log2 - b_base[:, None])
    b_factor = gl.exp2(b_m * scale_log2 - b_base)
    return b_p, b_factor, b_max, b_l * b_factor + gl.sum(b_p, 1)


@gluon.jit
def _clear_values(b_v, length, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows from `length` on, which belong to no token and may hold anything."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for part in gl.static_range(BN // 32):
        rows = b_v.slice(part * 32, 32)
        o_row = part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, LAYOUT))
        b_rows = rows.load(LAYOUT)
        rows.store(gl.where(o_row[:, None] < length, b_rows, gl.zeros_like(b_rows)))
    fence_async_shared()


@gluon.jit
def _step(
    b_acc, b_w, b_m, b_l, q, k_ring, v_ring, k_ready, k_free, v_ready, v_free, my_turn, its_turn,
    i, start, o_position, scale_log2,
    BN: gl.constexpr, GQ: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    TURNS: gl.constexpr, S: gl.constexpr, P: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Scores of ring tile i while the values of tile i - 1 are taken in; then i's softmax."""
    k_stage, v_stage = i % STAGES, (i - 1) % STAGES
    mbarrier.wait(k_ready.index(k_stage), (i // STAGES) & 1)
    if TURNS:
        mbarrier.wait(my_turn, i & 1)
    b_s = _start_scores(q, k_ring.index(k_stage), BN, GQ, S)
    # float32 until here: as a loop's own, bfloat16 is unpacked and packed again
    b_p = gl.convert_layout(b_w.to(k_ring.dtype), P)
    mbarrier.wait(v_ready.index(v_stage), ((i - 1) // STAGES) & 1)
    b_acc = warpgroup_mma(b_p, v_ring.index(v_stage), b_acc, is_async=True)
    if TURNS:
        mbarrier.arrive(its_turn)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    mbarrier.arrive(k_free.index(k_stage))
    b_w, b_factor, b_m, b_l = _softmax(b_s, b_m, b_l, o_position, start, scale_log2, BN, MASKED, S)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    mbarrier.arrive(v_free.index(v_stage))
    b_acc = b_acc * gl.convert_layout(b_factor, gl.SliceLayout(1, A))[:, None]
    return b_acc, b_w, b_m, b_l


@gluon.jit
def _attend(
    out, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free, turns,
    i_group, position, num_queries, tiles, seq_len, stride_token, scale_log2,
    BN: gl.constexpr, D: gl.constexpr, GQ: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One group: 64 queries from `position` on, of which `num_queries` exist; `out` is theirs."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    W: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    my_turn, its_turn = turns.index(i_group), turns.index(1 - i_group)
    q = q_tile.index(i_group)
    o_position = position + gl.arange(0, GQ, layout=gl.SliceLayout(1, S))
    b_m = gl.full([GQ], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    b_l = gl.zeros([GQ], gl.float32, gl.SliceLayout(1, S))
    b_acc = gl.zeros([GQ, D], gl.float32, A)

    start = (tiles - 1) * BN
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    if TURNS:
        mbarrier.wait(my_turn, 0)
    b_s = _start_scores(q, k_ring.index(0), BN, GQ, S)
    if TURNS:
        mbarrier.arrive(its_turn)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    mbarrier.arrive(k_free.index(0))
    b_w, _, b_m, b_l = _softmax(b_s, b_m, b_l, o_position, start, scale_log2, BN, True, S)
    if start + BN > seq_len:
        mbarrier.wait(v_ready.index(0), 0)
        _clear_values(v_ring.index(0), seq_len - start, BN, D)

    # the tiles whose keys are not all seen by the first query: one more, unless tiles align
    masked = gl.minimum(tiles - (position + 1) // BN, tiles)
    for i in range(1, masked):
        b_acc, b_w, b_m, b_l = _step(
            b_acc, b_w, b_m, b_l, q, k_ring, v_ring, k_ready, k_free, v_ready, v_free,
            my_turn, its_turn, i, (tiles - 1 - i) * BN, o_position, scale_log2,
            BN, GQ, STAGES, True, TURNS, S, P, A,
        )  # fmt: skip
    for i in range(gl.maximum(masked, 1), tiles):
        b_acc, b_w, b_m, b_l = _step(
            b_acc, b_w, b_m, b_l, q, k_ring, v_ring, k_ready, k_free, v_ready, v_free,
            my_turn, its_turn, i, (tiles - 1 - i) * BN, o_position, scale_log2,
            BN, GQ, STAGES, False, TURNS, S, P, A,
        )  # fmt: skip
    last = tiles - 1
    b_p = gl.convert_layout(b_w.to(k_ring.dtype), P)
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    b_acc = warpgroup_mma(b_p, v_ring.index(last % STAGES), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    b_inverse = 1.0 / gl.where(b_l == 0.0, 1.0, b_l)
    b_acc = b_acc * gl.convert_layout(b_inverse, gl.SliceLayout(1, A))[:, None]
    # through the memory of the queries, which nobody reads any more, to whole lines
    q.store(b_acc.to(out.dtype.element_ty))
    b_out = q.load(W)
    o_query = gl.arange(0, GQ, layout=gl.SliceLayout(1, W))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, W))
    gl.store(
        out + o_query[:, None] * stride_token + o_d[None, :],
        b_out,
        mask=(o_query < num_queries)[:, None],
    )


@gluon.jit(
    do_not_specialize=["num_seqs", "stride_table", "page_rows", "head_rows"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def hopper_prefill_kernel(
    q_rows,
    k_rows,
    v_rows,
    out,
    block_tables,
    query_start_loc,
    seq_lens,
    num_seqs,
    scale_log2,
    stride_out_token,
    stride_table,
    page_rows,
    head_rows,
    G: gl.constexpr,
    D: gl.constexpr,
    BS: gl.constexpr,
    BN: gl.constexpr,
    GQ: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    BQ: gl.constexpr = 2 * GQ
    # the last blocks of a sequence see most keys: they start first
    i_block = gl.num_programs(1) - 1 - gl.program_id(1)
    i_h = gl.program_id(0)
    i_s = _find_sequence(query_start_loc, i_block, num_seqs, BQ)
    query_start = gl.load(query_start_loc + i_s)
    query_len = gl.load(query_start_loc + i_s + 1) - query_start
    first_query = (i_block - query_start // BQ - i_s) * BQ
    if first_query < query_len:
        seq_len = gl.load(seq_lens + i_s)
        position = seq_len - query_len + first_query
        tiles = gl.cdiv(gl.minimum(position + BQ, seq_len), BN)
        q_row = query_start + first_query
        p_out = out + q_row.to(gl.int64) * stride_out_token + i_h * D
        p_table = block_tables + i_s.to(gl.int64) * stride_table

        DTYPE: gl.constexpr = k_rows.dtype
        q_tile = gl.allocate_shared_memory(DTYPE, [2, GQ, D], q_rows.layout)
        k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], k_rows.layout)
        v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], v_rows.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready, count=1)
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(stage), count=1)
            mbarrier.init(v_ready.index(stage), count=1)
            # both groups are done with a tile
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_free.index(stage), count=2)
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
        mbarrier.arrive(turns.index(0))
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        p_out, q_tile, k_ring, v_ring, q_ready, k_ready, k_free, v_ready, v_free,
                        turns, 0, position, query_len - first_query, tiles, seq_len,
                        stride_out_token, scale_log2, BN, D, GQ, STAGES, TURNS,
                    ),
                ),
                (
                    _attend,
                    (
                        p_out + GQ * stride_out_token, q_tile, k_ring, v_ring, q_ready, k_ready,
                        k_free, v_ready, v_free, turns, 1, position + GQ,
                        query_len - first_query - GQ, tiles, seq_len, stride_out_token, scale_log2,
                        BN, D, GQ, STAGES, TURNS,
                    ),
                ),
                (
                    _load,
                    (
                        q_rows, k_rows, v_rows, q_tile, k_ring, v_ring, q_ready, k_ready, k_free,
                        v_ready, v_free, q_row, i_h * D, p_table, tiles, (seq_len - 1) // BS,
                        i_h // G * head_rows, page_rows, BS, BN, D, GQ, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [GROUP_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
