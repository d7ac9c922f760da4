"""Objects cover a prompt exactly, and copies move each token to its slot and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.pages import (
    TokenRange,
    block_runs,
    object_ranges,
    overlapping,
    plan_objects,
    token_bytes,
)
from diptych.engine.request import KVObject
from diptych.errors import ConfigError
from diptych.hashing import HashChain, root_hash
from tests.connectors.fakes import fetched, make_cache, make_layout, scattered, token_kv

BLOCK_SIZES = (16, 32, 64)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, []),
        (1, [(0, 1)]),
        (63, [(0, 63)]),
        (64, [(0, 64)]),
        (65, [(0, 64), (64, 65)]),
        (200, [(0, 64), (64, 128), (128, 192), (192, 200)]),
    ],
)
def test_a_prompt_is_pages_and_one_tail(num_tokens: int, expected: list[tuple[int, int]]) -> None:
    assert object_ranges(num_tokens) == expected


def test_a_pages_key_is_the_hash_of_its_last_unit_and_the_tail_continues_the_chain() -> None:
    tokens = list(range(150))
    chain = HashChain(root_hash(b"ns"))
    objects = plan_objects(150, lambda n: chain.prefix_hash(tokens, n))
    chain.extend(tokens)
    assert objects[0].key == chain.units[3]
    assert objects[1].key == chain.units[7]
    assert objects[2].key == HashChain(root_hash(b"ns")).prefix_hash(tokens, 150)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
@given(bounds=st.tuples(st.integers(0, 200), st.integers(0, 200)), before=st.integers(0, 70))
def test_runs_agree_with_walking_the_tokens(
    block_size: int, bounds: tuple[int, int], before: int
) -> None:
    start, end = sorted(bounds)
    object_start = max(0, start - before)
    walked = [(p // block_size, p % block_size, p - object_start) for p in range(start, end)]
    runs = block_runs(TokenRange(start, end), object_start, block_size)
    assert walked == [
        (run.block_index, run.slot + i, run.offset + i)
        for run in runs
        for i in range(run.num_tokens)
    ]
    assert len({run.block_index for run in runs}) == len(runs)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_partial_range_needs_just_the_objects_that_touch_it(n: int, a: int, b: int) -> None:
    wanted = TokenRange(min(a, b), max(a, b))
    objects = [
        KVObject(key=b"", start_token=r.start, end_token=r.end, checksum=0, num_bytes=0)
        for r in object_ranges(n)
    ]
    positions = set(range(*wanted))
    expected = [o for o in objects if positions & set(range(o.start_token, o.end_token))]
    assert overlapping(objects, wanted) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gather_gives_the_canonical_layout(block_size: int, dtype: str) -> None:
    layout = make_layout(block_size, dtype=dtype)
    cache, block_ids = make_cache(layout, seed=0), [5, 3, 9, 1, 0, 7, 2, 11]
    copier = CacheCopier(cache)
    for tokens in (TokenRange(0, 64), TokenRange(64, 101), TokenRange(64, 65)):
        data = fetched(copier, block_ids, tokens)
        count = tokens.end - tokens.start
        assert data.nbytes == count * token_bytes(layout) == count * copier.token_bytes
        page = torch.frombuffer(bytearray(data), dtype=cache.dtype)
        page = page.view(layout.num_kv_heads, layout.num_layers, 2, count, layout.head_dim)
        for i, position in enumerate(range(*tokens)):
            assert torch.equal(page[:, :, :, i], token_kv(cache, block_ids, position))


@pytest.mark.parametrize("wanted", [(64, 128), (80, 128), (64, 127), (100, 101), (71, 90)])
@pytest.mark.parametrize("target_size", BLOCK_SIZES)
@pytest.mark.parametrize("source_size", BLOCK_SIZES)
def test_scatter_moves_a_range_between_any_block_sizes_and_touches_nothing_else(
    source_size: int, target_size: int, wanted: tuple[int, int]
) -> None:
    source, ours = make_cache(make_layout(source_size), seed=1), [4, 8, 1, 3, 2, 6, 7, 9]
    target, theirs = make_cache(make_layout(target_size), seed=2), [7, 2, 5, 3, 1, 8, 0, 4]
    before = target.clone()
    out, into = CacheCopier(source), CacheCopier(target)
    data = fetched(out, ours, TokenRange(64, 128))
    scattered(into, data, 64, theirs, TokenRange(*wanted))
    for position in range(128):
        moved = wanted[0] <= position < wanted[1]
        expected = token_kv(source, ours, position) if moved else token_kv(before, theirs, position)
        assert torch.equal(token_kv(target, theirs, position), expected)
        token_kv(before, theirs, position).copy_(token_kv(target, theirs, position))
    assert torch.equal(before, target)


def test_kv_of_an_unknown_dtype_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="int3"):
        token_bytes(make_layout(16, dtype="int3"))
