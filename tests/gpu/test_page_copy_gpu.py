"""Page connectors on a CUDA cache: the bytes are those that a CPU cache gives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.pages import TokenRange
from diptych.connectors.shared_storage import FileStore
from tests.connectors.engines import OUR_BLOCKS, PROMPT, Engine, running
from tests.connectors.fakes import consumer, make_cache, make_layout, producer, same_kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_gather_and_scatter_agree_with_the_cpu(block_size: int, dtype: str) -> None:
    cache = make_cache(make_layout(block_size, dtype=dtype), seed=3)
    here, there = CacheCopier(cache), CacheCopier(cache.cuda())
    empty = make_cache(make_layout(block_size, dtype=dtype))
    on_gpu = empty.cuda()
    for tokens in (TokenRange(0, 64), TokenRange(64, 101), TokenRange(128, 129)):
        ours = here.to_host([here.gather(OUR_BLOCKS, tokens)], None)[0]
        theirs = there.to_host([there.gather(OUR_BLOCKS, tokens)], there.mark())[0]
        assert bytes(ours) == bytes(theirs)
        part = TokenRange(tokens.start + (tokens.end - tokens.start) // 3, tokens.end)
        data = torch.frombuffer(bytearray(ours), dtype=torch.uint8).numpy()
        into = CacheCopier(on_gpu)
        into.scatter(data, tokens.start, OUR_BLOCKS, part, into.mark())
        CacheCopier(empty).scatter(data, tokens.start, OUR_BLOCKS, part, None)
        assert torch.equal(on_gpu.cpu(), empty)


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


def test_a_copy_waits_for_the_model_stream() -> None:
    """A step that still computes is not read early."""
    cache = make_cache(make_layout(64, dtype="bfloat16")).cuda()
    copier = CacheCopier(cache)
    weight = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        weight = weight @ weight / 64
    cache.fill_(1.5)
    started = time.monotonic()
    page = copier.gather(OUR_BLOCKS, TokenRange(0, 64))
    data = copier.to_host([page], copier.mark())[0]
    assert time.monotonic() - started < 30
    assert (torch.frombuffer(bytearray(data), dtype=torch.bfloat16) == 1.5).all()
