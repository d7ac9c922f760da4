"""KV from one engine's GPU memory straight into another's, on one GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from diptych.connectors.transports.nixl import PACKAGES
from tests.connectors.direct_pair import PREFILL, running_pair
from tests.engine.make_requests import make_request
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
PROMPT = [(7 * i) % 250 for i in range(300)]
SAMPLING = {"max_tokens": 8, "temperature": 0.9, "seed": 3}
GPU = {"device": "cuda", "attention_backend": "triton"}


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_the_answer_is_that_of_one_engine(tmp_path: Path, transport: str) -> None:
    """NIXL reads where the pools lie; TCP stages them in host memory."""
    if transport == "nixl" and not any(importlib.util.find_spec(name) for name in PACKAGES):
        pytest.skip("NIXL is not installed")
    settings = {**GPU, "transports": transport}
    async with running_pair(
        make_tiny_model(tmp_path / "model"),
        prefill={**settings, "block_size": 64},
        decode={**settings, "block_size": 16},
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
