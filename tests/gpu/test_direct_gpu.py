"""KV from one engine's GPU memory straight into another's: on two GPUs where there are two."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from diptych.connectors.kv_checksums import HostChecksums, TorchChecksums
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.nixl import PACKAGES
from tests.connectors.direct_pair import PREFILL, running_pair
from tests.engine.make_requests import make_request
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
PROMPT = [(7 * i) % 250 for i in range(300)]
SAMPLING = {"max_tokens": 8, "temperature": 0.9, "seed": 3}
GPU = {"device": "cuda", "attention_backend": "triton"}
OTHER_GPU = {**GPU, "device": "cuda:1" if torch.cuda.device_count() > 1 else "cuda"}


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl", "tcp"])
async def test_the_answer_is_that_of_one_engine(tmp_path: Path, transport: str) -> None:
    """CUDA IPC and NIXL read where the pools lie; TCP stages them in host memory."""
    if transport == "nixl" and not any(importlib.util.find_spec(name) for name in PACKAGES):
        pytest.skip("NIXL is not installed")
    settings = {"transports": transport}
    async with running_pair(
        make_tiny_model(tmp_path / "model"),
        prefill={**GPU, **settings, "block_size": 64},
        decode={**OTHER_GPU, **settings, "block_size": 16},
    ) as pair:
        await pair.decode.client.submit(make_request("own", PROMPT, cache_salt="x", **SAMPLING))
        await pair.decode.ended("own")
        computed = pair.decode.client.stats.prompt_tokens_local_compute
        for name in ("r", "again"):
            await pair.submit(name, PROMPT, **SAMPLING)
            await pair.ended(name)
            assert not pair.decode.failures
            assert pair.answer(name) == [token for _, token in pair.decode.tokens["own"]]
        assert pair.decode.links[PREFILL].transport == transport
        assert pair.decode.client.stats.prompt_tokens_local_compute == computed
        await pair.all_free()


async def test_a_cpu_checks_what_it_reads_of_a_gpu(tmp_path: Path) -> None:
    """Both take the same checksums, of unlike blocks."""
    prefill = {**GPU, "transports": "tcp", "block_size": 16}
    decode = {"transports": "tcp", "block_size": 32}
    async with running_pair(
        make_tiny_model(tmp_path / "model"), prefill=prefill, decode=decode
    ) as pair:
        for name in ("r", "again"):
            await pair.submit(name, PROMPT, **SAMPLING)
            await pair.ended(name)
            assert not pair.decode.failures
            assert pair.prefill.commits[name].num_tokens == len(PROMPT)
        assert pair.decode.client.stats.num_kv_corrupt == 0
        await pair.all_free()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_checksums_on_the_device_are_those_of_the_host(dtype: torch.dtype) -> None:
    """While the device is busy with something else; and a flipped byte shows in its block."""
    torch.manual_seed(0)
    pool = torch.randn(20, 8, 4, 2, 64, 128).to(dtype).cuda()
    geometry = PoolGeometry(
        num_blocks=20,
        block_size=64,
        heads=Span(0, 8),
        layers=Span(0, 4),
        atom_bytes=128 * pool.element_size(),
    )
    block_ids = torch.randperm(20)[:9].tolist()
    checksums = TorchChecksums(pool, geometry)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-4
    pending = [checksums.begin(block_ids, start, 64 * 8 + 17, 32) for start in (0, 96)]

    def on_host() -> list[int]:
        array = pool.cpu().view(torch.uint8).reshape(-1).numpy()
        return HostChecksums(array, geometry).begin(block_ids, 0, 64 * 8 + 17, 32)()

    expected = on_host()
    assert pending[0]() == expected
    assert pending[1]() == expected[3:]
    pool.view(torch.uint8)[block_ids[4], 3, 1, 1, 40, 77] ^= 1
    torch.cuda.synchronize()
    changed = checksums.begin(block_ids, 0, 64 * 8 + 17, 32)()
    assert [a == b for a, b in zip(changed, expected, strict=True)] == [i != 9 for i in range(17)]
    assert changed == on_host()
