"""`diptych bench prefix`: time to the first token of a prompt whose prefix only the store has.

A prefill engine computes a prompt and hands it over, which stores its pages. The engine is then
ended and a new one is started, so that nothing but the store is warm, and gets the same prefix with
other tokens after it. Beside it stands the same prompt without anything stored.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import time
from typing import NamedTuple

from diptych.bench.offline import (
    add_engine_arguments,
    engine_arguments,
    model_directory,
    report,
    say,
)
from diptych.bench.store_node import running_node
from diptych.config import GIB, EngineConfig, KVTransferConfig
from diptych.engine.core_client import EngineCoreClient
from diptych.engine.request import EngineCoreRequest, KVTransferParams
from diptych.errors import EngineDeadError
from diptych.sampling_params import SamplingParams

_WARM_UP_TOKENS = 256
# Ids that every vocabulary has and that mean nothing special.
_FIRST_ID, _NUM_IDS = 100, 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--prefix-tokens", type=int, default=4096, help="tokens that the store has")
    add("--new-tokens", type=int, default=64, help="tokens after them")
    add("--rounds", type=int, default=2, help="prefixes, each cold and warm")
    add("--settle", type=float, default=0.0, help="seconds after a start: a GPU pins the pool")
    add("--pool-bytes", type=int, default=4 * GIB, help="memory of the store")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    directory = model_directory(args)
    config = EngineConfig(model=str(directory), **engine_arguments(args))
    with running_node(args.pool_bytes) as address:
        cold, warm, loaded = asyncio.run(_measure(args, config, address))
    cold_s, warm_s = (statistics.median(t.first_s for t in times) for times in (cold, warm))
    figures = {
        "cold_s": cold_s,
        "warm_s": warm_s,
        "ratio": warm_s / cold_s,
        "stored_s": statistics.median(t.stored_s for t in cold),
        "loaded_tokens": loaded,
        "load_average": os.getloadavg()[0],
        "seconds": {
            "cold": [t._asdict() for t in cold],
            "warm": [t._asdict() for t in warm],
        },
    }
    say(
        f"{args.prefix_tokens} + {args.new_tokens} tokens: cold {cold_s:.3f} s, "
        f"warm {warm_s:.3f} s ({100 * warm_s / cold_s:.1f} %), {loaded} tokens loaded"
    )
    report("prefix", args, config.device, figures)
    return 0


async def _measure(
    args: argparse.Namespace, config: EngineConfig, address: str
) -> tuple[list[Times], list[Times], int]:
    """The times of each prefix, cold and warm, and the tokens that the warm ones loaded."""
    draw = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        return [_FIRST_ID + draw.randrange(_NUM_IDS) for _ in range(count)]

    transfer = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"kvstore": address},
    )
    config = dataclasses.replace(config, kv_transfer_config=transfer, enable_prefix_caching=True)
    prefixes = [tokens(args.prefix_tokens) for _ in range(args.rounds)]
    async with _Prefill(config) as engine:
        await engine.warm_up(tokens(_WARM_UP_TOKENS), args.settle)
        cold = [await engine.first_token([*p, *tokens(args.new_tokens)]) for p in prefixes]
    async with _Prefill(config) as engine:
        await engine.warm_up(tokens(_WARM_UP_TOKENS), args.settle)
        warm = [await engine.first_token([*p, *tokens(args.new_tokens)]) for p in prefixes]
        loaded = engine.client.stats.prompt_tokens_external_kv_transfer
    return cold, warm, loaded


class Times(NamedTuple):
    """Seconds to the first token, and from there until the whole prompt is in the store."""

    first_s: float
    stored_s: float


class _Prefill:
    """`async with`: a prefill engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self.client = EngineCoreClient()
        self._config = config
        self._count = 0

    async def __aenter__(self) -> _Prefill:
        await self.client.start(self._config)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def warm_up(self, prompt: list[int], settle_s: float) -> None:
        """One prompt that is not measured, and time for what it sets going."""
        await self.first_token(prompt)
        await asyncio.sleep(settle_s)

    async def first_token(self, prompt: list[int]) -> Times:
        """Returns once the prompt has been handed over."""
        self._count += 1
        request = EngineCoreRequest(
            request_id=str(self._count),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, seed=0, max_tokens=2),
            kv_transfer_params=KVTransferParams(do_remote_decode=True),
        )
        began = time.monotonic()
        first_s = 0.0
        await self.client.submit(request)
        async for outputs in self.client.outputs():
            if outputs.errors:
                raise EngineDeadError(next(iter(outputs.errors.values())))
            if outputs.token_ids and not first_s:
                first_s = time.monotonic() - began
            if outputs.commits:
                return Times(first_s, time.monotonic() - began - first_s)
        raise EngineDeadError("the engine ended")
