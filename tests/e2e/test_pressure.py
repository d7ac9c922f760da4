"""Many requests on caches that hold few of them, with clients that leave: no error, no leak."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from tests.e2e.cluster import Api, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The least that one request of the longest context needs is 64.
NUM_KV_BLOCKS = 70
SHARED = random.Random(0).choices(range(3, 200), k=200)


def ask(api: Api, number: int, *, may_leave: bool = True) -> str | None:
    """Request `number`: its text, or None where its client left somewhere on the way."""
    rng = random.Random(number)
    ids = rng.choices(range(3, 200), k=rng.randint(1, 300))
    if rng.random() < 0.2:
        ids = SHARED[: rng.randint(10, len(SHARED))]
    fields = {"max_tokens": rng.choice([1, 2, 10, 60, 200]), "seed": number, "ignore_eos": True}
    if rng.random() < 0.4 and may_leave:
        with api.streaming(ids, **fields) as events:
            for event in islice(events, rng.randint(0, int(fields["max_tokens"]))):
                assert '"error"' not in event
        return None
    return str(api.complete(ids, **fields)["choices"][0]["text"])


def test_answers_under_pressure_are_those_given_alone_and_nothing_leaks(tmp_path: Path) -> None:
    with cluster(make_tiny_model(tmp_path / "model"), tmp_path) as made:
        _, store = made.kvstore()
        prefill, first = made.worker("prefill", store=store, num_kv_blocks=NUM_KV_BLOCKS)
        pressed = {"num_kv_blocks": NUM_KV_BLOCKS, "reserve_output": False}
        decode, second = made.worker("decode", store=store, **pressed)
        router, api = made.router(first, second)
        made.wait_ready()
        until(lambda: router.metric("diptych:workers_ready") == 2, "both workers are connected")

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda number: ask(api, number), range(200)))

        assert decode.metric("vllm:num_preemptions_total") > 0, "there was no pressure"
        for worker in (prefill, decode):
            until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks")
            assert worker.metric("vllm:num_requests_running") == 0
            assert worker.metric("vllm:num_requests_waiting") == 0
        until(lambda: router.metric("vllm:num_requests_running") == 0, "the router is idle")
        for number in random.Random(1).sample(range(200), 40):
            if answers[number] is not None:
                assert ask(api, number, may_leave=False) == answers[number]
