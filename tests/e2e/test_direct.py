"""Prefill and decode at once, decode reading prefill's memory: the answer is that of one engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.answers import check_equal, check_side_by_side, of_every_sampling, prompt
from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(900)


@dataclass
class Direct:
    """A pair without a store, and an aggregated worker with a router of its own."""

    router: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    split: Api
    whole: Api

    def until_free(self) -> None:
        for worker in (self.prefill, self.decode):
            until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Direct]:
    directory = tmp_path_factory.mktemp("direct")
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        # chunks of 32 tokens: decode reads the first while prefill computes the next
        direct = {"handoff": "direct"}
        prefill, first = made.worker("prefill", worker=direct, max_num_batched_tokens=32)
        decode, second = made.worker("decode", worker=direct)
        _, aggregated = made.worker("worker")
        router, split = made.router(first, second, handoff="direct")
        _, whole = made.router(aggregated)
        made.wait_ready()
        yield Direct(router, prefill, decode, split, whole)


@pytest.mark.parametrize("num_tokens", [1, 40, 64, 150])
def test_prefill_computes_the_whole_prompt_and_decode_reads_all_of_it(
    services: Direct, num_tokens: int
) -> None:
    prefill, decode = services.prefill, services.decode
    computed = prefill.prompt_tokens("local_compute")
    received = decode.prompt_tokens("external_kv_transfer")

    answer = services.split.complete(
        prompt(num_tokens, salt=num_tokens), max_tokens=8, temperature=0, ignore_eos=True
    )

    assert answer["usage"]["completion_tokens"] == 8
    services.until_free()
    assert prefill.prompt_tokens("local_compute") - computed == num_tokens
    assert decode.prompt_tokens("external_kv_transfer") - received == num_tokens
    assert decode.prompt_tokens("local_compute") == 0


@of_every_sampling
@pytest.mark.parametrize("num_tokens", [5, 130])
def test_the_answer_is_that_of_one_engine(
    services: Direct, num_tokens: int, sampling: dict[str, Any]
) -> None:
    check_equal(services.split, services.whole, num_tokens, sampling)


def test_requests_side_by_side_get_the_answers_they_get_alone(services: Direct) -> None:
    check_side_by_side(services.split)
    assert services.decode.prompt_tokens("local_compute") == 0


def test_a_prefix_that_is_at_hand_is_handed_over_too(services: Direct) -> None:
    ids = prompt(100, salt=5)
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = services.split.complete(ids, **fields)
    again = services.split.complete(ids, **fields)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    services.until_free()


def test_one_token_needs_no_hand_off(services: Direct) -> None:
    received = services.decode.prompt_tokens("external_kv_transfer")
    answer = services.split.complete(prompt(20, salt=3), max_tokens=1, temperature=0)
    assert answer["usage"]["completion_tokens"] == 1
    services.until_free()
    assert services.decode.prompt_tokens("external_kv_transfer") == received


def test_a_client_that_leaves_frees_its_blocks_everywhere(services: Direct) -> None:
    ids = prompt(100, salt=4)
    with services.split.streaming(ids, max_tokens=900, temperature=0, ignore_eos=True) as events:
        for _ in range(5):
            assert json.loads(next(events))["choices"]
    services.until_free()
    for worker in (services.prefill, services.decode):
        until(lambda w=worker: w.metric("vllm:num_requests_running") == 0, "nothing runs")


def test_every_one_of_these_went_from_worker_to_worker(services: Direct) -> None:
    assert services.router.metric("diptych:attempts_total", stage="pair") > 30
    for stage in ("prefill", "decode", "whole"):
        assert services.router.metric("diptych:attempts_total", stage=stage) == 0
    assert services.router.metric("diptych:attempts_failed_total") == 0
    assert services.decode.metric("diptych:handoff_read_seconds_total") > 0
