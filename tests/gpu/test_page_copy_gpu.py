"""Page connectors on a CUDA cache: the bytes are those that a CPU cache gives."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch

from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.pages import TokenRange
from diptych.connectors.shared_storage import FileStore
from diptych.connectors.store_move import finish
from tests.connectors.engines import OUR_BLOCKS, PROMPT, Engine, running
from tests.connectors.fakes import (
    consumer,
    fetched,
    make_cache,
    make_layout,
    producer,
    same_kv,
    scattered,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_gather_and_scatter_agree_with_the_cpu(block_size: int, dtype: str) -> None:
    cache = make_cache(make_layout(block_size, dtype=dtype), seed=3)
    here, there = CacheCopier(cache), CacheCopier(cache.cuda())
    empty = make_cache(make_layout(block_size, dtype=dtype))
    on_gpu = empty.cuda()
    for tokens in (TokenRange(0, 64), TokenRange(64, 101), TokenRange(128, 129)):
        ours = fetched(here, OUR_BLOCKS, tokens)
        assert bytes(ours) == bytes(fetched(there, OUR_BLOCKS, tokens))
        part = TokenRange(tokens.start + (tokens.end - tokens.start) // 3, tokens.end)
        scattered(CacheCopier(on_gpu), ours, tokens.start, OUR_BLOCKS, part)
        scattered(CacheCopier(empty), ours, tokens.start, OUR_BLOCKS, part)
        assert torch.equal(on_gpu.cpu(), empty)


@pytest.mark.parametrize("block_size", [32, 64])
def test_many_objects_are_gathered_as_each_of_them(block_size: int) -> None:
    cache = make_cache(make_layout(block_size, num_blocks=200, dtype="bfloat16"), seed=3).cuda()
    torch.cuda.synchronize()
    copier, blocks = CacheCopier(cache), list(range(199, 99, -1))
    ranges = [TokenRange(at * 64, at * 64 + 64) for at in range(40)] + [TokenRange(2560, 2600)]
    pages = list(copier.gather_all(blocks, ranges))
    alone = [copier.gather(blocks, tokens) for tokens in ranges]
    copier.mark()
    for page, one in zip(pages, alone, strict=True):
        assert torch.equal(page, one)


def test_a_pool_that_is_pinned_is_reached_directly_and_gives_the_same_bytes() -> None:
    layout = make_layout(64, dtype="bfloat16")
    cache = make_cache(layout, seed=3).cuda()
    copier = CacheCopier(cache)
    size = 64 * copier.token_bytes
    pool = memoryview(mmap.mmap(-1, 1 << 20))
    copier.reach([pool])
    pools = copier._pools
    assert pools is not None
    deadline = time.monotonic() + 30
    while pools.tensor(pool[:1]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    view = pool[4096 : 4096 + size]
    finish(copier.fetch(copier.gather(OUR_BLOCKS, TokenRange(0, 64)), copier.mark(), view))
    assert bytes(view) == bytes(fetched(copier, OUR_BLOCKS, TokenRange(0, 64)))
    empty = make_cache(layout).cuda()
    scattered(CacheCopier(empty), view.toreadonly(), 0, OUR_BLOCKS, TokenRange(0, 64))
    assert same_kv((cache, OUR_BLOCKS), (empty, OUR_BLOCKS), 0, 64)
    copier.reach([])
    assert pools.tensor(view) is None


def test_a_prompt_moves_between_gpu_and_cpu_engines(tmp_path: Path) -> None:
    prefill = Engine(FileStore(tmp_path), 64, seed=1, device="cuda")
    middle = Engine(FileStore(tmp_path), 16, device="cuda")
    with running(prefill, middle):
        before = prefill.cache.cpu()
        prefill.step((producer("r", PROMPT), 150))
        prefill.cache.zero_()  # the blocks are free as soon as the step has returned
        commit = prefill.wait("finished_sending").commits["r"]
        assert commit.num_tokens == 150
        assert not middle.load(consumer("r", PROMPT, commit)).failed_recving
        assert same_kv((before, OUR_BLOCKS), (middle.cache.cpu(), OUR_BLOCKS), 0, 150)


def test_a_copy_does_not_wait_for_the_step_in_flight_which_waits_for_it() -> None:
    cache = make_cache(make_layout(64, dtype="bfloat16")).cuda()
    cache.fill_(1.5)
    copier = CacheCopier(cache)
    weight = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(400):  # a second
        weight = weight @ weight / 64
    in_flight = torch.cuda.current_stream().record_event()
    page = copier.gather(OUR_BLOCKS, TokenRange(0, 64))
    mark = copier.mark()
    cache.zero_()  # the next step has the blocks
    data = memoryview(bytearray(page.nbytes))
    finish(copier.fetch(page, mark, data))
    assert not in_flight.query()
    assert (torch.frombuffer(bytearray(data), dtype=torch.bfloat16) == 1.5).all()
