"""Requests for tests, by their few interesting fields."""

from __future__ import annotations

from typing import Any

from diptych.engine.request import EngineCoreRequest, KVTransferParams
from diptych.sampling_params import SamplingParams


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    output: list[int] | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    eos: list[int] | None = None,
    transfer: KVTransferParams | None = None,
    **sampling: Any,
) -> EngineCoreRequest:
    values = {"max_tokens": 4, "seed": 0, "ignore_eos": eos is None, **sampling}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        sampling_params=SamplingParams(**values),
        eos_token_ids=eos or [],
        priority=priority,
        cache_salt=cache_salt,
        kv_transfer_params=transfer,
    )
