import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.connectors.plan import BlockTable, Share, plan_read, plan_readers, plan_sources
from diptych.connectors.plan_geometry import (
    HEAD_OUTERMOST,
    LAYER_OUTERMOST,
    SLOT_BEFORE_HEAD,
    PoolGeometry,
    Span,
    rank_heads,
    rank_layers,
)
from diptych.errors import TransferError
from tests.connectors.brute_force_kv import Ranks, expected, move, prompt

LAYOUTS = (HEAD_OUTERMOST, LAYER_OUTERMOST, SLOT_BEFORE_HEAD)
SIZES = tuple(itertools.product((16, 32, 64), repeat=2))
TOKENS = 77  # two blocks of 64 with a tail in every size


def hand_over(
    source: dict, target: dict, heads: int, layers: int, parts: int, start: int, end: int
) -> None:
    """Plan, move and compare with the move of single elements."""
    rng = np.random.default_rng([heads, layers, parts, start, end])
    kv = prompt(rng, TOKENS, heads, layers, parts)
    common = {
        "num_kv_heads": heads,
        "num_layers": layers,
        "parts": parts,
        "num_tokens": TOKENS,
    }
    ours, theirs = Ranks(rng, **target, **common), Ranks(rng, **source, **common)
    theirs.fill(kv)
    wanted = expected(ours, kv, start, end)
    move(theirs, ours, start, end)
    for got, want in zip(ours.pools, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["gqa", "replicated", "mla"])
@pytest.mark.parametrize("pp", list(itertools.product((1, 2, 4), repeat=2)), ids=str)
@pytest.mark.parametrize("tp", list(itertools.product((1, 2, 4, 8), repeat=2)), ids=str)
def test_every_shape_of_workers_reads_every_element(
    tp: tuple[int, int], pp: tuple[int, int], kind: str
) -> None:
    heads, parts = {"gqa": (8, 2), "replicated": (2, 2), "mla": (1, 1)}[kind]
    # block sizes and layouts go round, so that each pair of ranks meets some and all are met
    turn = sum(b * w for b, w in zip((*tp, *pp), (1, 5, 3, 7), strict=True))
    sizes = SIZES[turn % len(SIZES)]
    layouts = (HEAD_OUTERMOST, LAYOUTS[turn % 3]) if kind != "mla" else (LAYER_OUTERMOST,) * 2
    source, target = (
        {"tp": tp[i], "pp": pp[i], "block_size": sizes[i], "axes": layouts[i]} for i in (0, 1)
    )
    hand_over(source, target, heads, 5, parts, start=turn % 3 * 17, end=TOKENS)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids=str)
def test_every_pair_of_layouts_and_block_sizes(layouts: tuple, sizes: tuple[int, int]) -> None:
    source, target = (
        {"tp": tp, "pp": 1, "block_size": sizes[i], "axes": layouts[i]}
        for i, tp in ((0, 2), (1, 1))
    )
    hand_over(source, target, 2, 2, 2, start=16, end=TOKENS)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_tokens_lands_where_it_belongs_and_nowhere_else(data: st.DataObject) -> None:
    draw = data.draw
    heads = draw(st.sampled_from([1, 2, 4, 6, 8]))
    fits = [tp for tp in (1, 2, 3, 4, 8) if heads % tp == 0 or tp % heads == 0]
    start = draw(st.integers(0, TOKENS - 1))
    end = draw(st.integers(start, TOKENS))
    source, target = (
        {
            "tp": draw(st.sampled_from(fits)),
            "pp": draw(st.sampled_from([1, 2, 3])),
            "block_size": draw(st.sampled_from([1, 3, 16, 24, 32, 64])),
            "axes": tuple(draw(st.permutations(HEAD_OUTERMOST))),
        }
        for _ in range(2)
    )
    hand_over(source, target, heads, 3, draw(st.sampled_from([1, 2])), start, end)


def pool(**changes: object) -> PoolGeometry:
    fields: dict = {
        "num_blocks": 128,
        "block_size": 64,
        "heads": Span(0, 8),
        "layers": Span(0, 32),
        "atom_bytes": 256,
    }
    return PoolGeometry(**{**fields, **changes})


FULL = Share(0, Span(0, 8), Span(0, 32))


def test_adjacent_blocks_become_one_run() -> None:
    ids = BlockTable.of([3, 4, 5, 9, 8])
    runs = plan_read(pool(), pool(), FULL, ids, BlockTable.of([0, 1, 2, 7, 6]), 0, 5 * 64)
    mib8 = 8 << 20
    # blocks of a queue that gives them in descending order are merged too
    assert list(zip(runs.src, runs.dst, runs.length, strict=True)) == [
        (3 * mib8, 0, 3 * mib8),
        (8 * mib8, 6 * mib8, 2 * mib8),
    ]


def test_a_scattered_4k_prompt_of_an_8b_is_one_run_a_block() -> None:
    ids = BlockTable(np.arange(0, 128, 2))
    assert len(plan_read(pool(), pool(), FULL, ids, ids, 0, 4096)) == 64
    half = pool(heads=Span(4, 8))
    share = FULL._replace(heads=half.heads)
    runs = plan_read(pool(), half, share, ids, ids, 0, 4096)
    assert len(runs) == 64
    assert set(runs.length) == {4 << 20}


def test_a_tail_is_read_to_the_end_of_its_block() -> None:
    ids = BlockTable.of([5, 3])
    assert len(plan_read(pool(), pool(), FULL, ids, ids, 0, 70)) == 2
    exact = plan_read(pool(), pool(), FULL, ids, ids, 0, 70, whole_tail=False)
    assert len(exact) == 1 + 8 * 32 * 2
    assert exact.num_bytes == 70 * 8 * 32 * 2 * 256
    # a read that begins inside that block stays as it is
    assert plan_read(pool(), pool(), FULL, ids, ids, 66, 70).num_bytes == 4 * 8 * 32 * 2 * 256


def test_a_whole_tail_touches_only_slots_past_the_end() -> None:
    rng = np.random.default_rng(0)
    kv = prompt(rng, 40, 2, 2, 2)
    common = {"tp": 1, "pp": 1, "num_kv_heads": 2, "num_layers": 2, "num_tokens": 40}
    ours = Ranks(rng, block_size=16, axes=HEAD_OUTERMOST, **common)
    theirs = Ranks(rng, block_size=16, axes=HEAD_OUTERMOST, **common)
    theirs.fill(kv)
    wanted = expected(ours, kv, 16, 40)[0]
    move(theirs, ours, 16, 40, whole_tail=True)
    size = ours.geometries[0].block_bytes
    tail = int(ours.ids[2]) * size + 5
    changed = np.flatnonzero(ours.pools[0] != wanted)
    assert len(changed)
    assert all(tail <= at < tail + size for at in changed)
    # [head * layer * part, slot, atom]: slots of the prompt are right
    block = ours.pools[0][tail : tail + size].reshape(8, 16, 3)
    np.testing.assert_array_equal(block[:, :8], wanted[tail : tail + size].reshape(8, 16, 3)[:, :8])


def test_tables_may_begin_at_a_later_block() -> None:
    whole = BlockTable.of([9, 4, 7, 2])
    late = BlockTable.of([7, 2], first=2)
    runs = plan_read(pool(), pool(), FULL, whole, late, 128, 256)
    same = plan_read(pool(), pool(), FULL, late, whole, 128, 256)
    assert runs.src.tolist() == runs.dst.tolist() == same.src.tolist()
    with pytest.raises(TransferError, match="target's block table"):
        plan_read(pool(), pool(), FULL, whole, late, 64, 256)


def test_what_lies_outside_is_refused() -> None:
    ids = BlockTable.of([1, 2])
    with pytest.raises(TransferError, match="source's block table"):
        plan_read(pool(), pool(), FULL, ids, BlockTable.of([1, 2, 3]), 0, 129)
    with pytest.raises(TransferError, match="outside the target's pool"):
        plan_read(pool(), pool(), FULL, ids, BlockTable.of([1, 128]), 0, 128)
    with pytest.raises(TransferError, match="no source holds heads 4-7 of layers 0-31"):
        plan_sources([pool(heads=Span(0, 4))], pool())
    with pytest.raises(TransferError, match="differ in atom_bytes: 128 there, 256 here"):
        plan_sources([pool(atom_bytes=128)], pool())
    with pytest.raises(TransferError, match="6 KV heads cannot be spread over 4 ranks"):
        rank_heads(6, 4, 0)
    with pytest.raises(TransferError, match="empty axis"):
        pool(heads=Span(2, 2))
    assert len(plan_read(pool(), pool(), FULL, ids, ids, 64, 64)) == 0


def ranks(tp: int, heads: int, pp: int = 1) -> list[PoolGeometry]:
    return [
        pool(heads=rank_heads(heads, tp, rank), layers=rank_layers(32, pp, stage))
        for stage in range(pp)
        for rank in range(tp)
    ]


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("tp", list(itertools.product((1, 2, 4, 8), repeat=2)), ids=str)
def test_replicas_take_turns_and_the_unread_are_known(tp: tuple[int, int], heads: int) -> None:
    sources, targets = ranks(tp[0], heads), ranks(tp[1], heads)
    readers = plan_readers(sources, targets)
    assert frozenset().union(*readers) == frozenset(range(tp[1]))
    load = sorted(len(ranks) for ranks in readers)
    if tp[0] <= tp[1]:
        assert load[-1] - load[0] <= 1, "no source does another's work"
    else:
        # a source without readers is released by its owner, so it must be known
        assert load.count(0) == max(0, tp[0] - max(tp[1], heads))
    for rank, target in enumerate(targets):
        shares = plan_sources(sources, target, rank)
        assert sum(len(share.heads) * len(share.layers) for share in shares) == (
            len(target.heads) * len(target.layers)
        )


def test_layers_of_unlike_pipelines_are_cut_at_both() -> None:
    shares = plan_sources(ranks(1, 8, pp=4), pool(layers=Span(4, 20)))
    assert [(share.source, share.layers) for share in shares] == [
        (0, Span(4, 8)),
        (1, Span(8, 16)),
        (2, Span(16, 20)),
    ]
    assert [len(rank_layers(30, 4, rank)) for rank in range(4)] == [8, 8, 7, 7]
