"""The split is real: prefill computes prompts, the store carries KV, decode computes no prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import check_equal, check_side_by_side, normal, of_every_sampling, prompt
from tests.e2e.cluster import Api, Cluster, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(900)


@dataclass
class Split:
    """One prefill, one decode, one store; and one aggregated worker with a router of its own."""

    cluster: Cluster
    store: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    aggregated: ServiceProcess
    split: Api
    whole: Api


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def services(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with cluster(model, tmp_path_factory.mktemp("cluster")) as made:
        store, store_address = made.kvstore()
        prefill, prefill_address = made.worker("prefill", store=store_address)
        decode, decode_address = made.worker("decode", store=store_address)
        aggregated, aggregated_address = made.worker("worker")
        _, split = made.router(prefill_address, decode_address)
        _, whole = made.router(aggregated_address)
        made.wait_ready()
        yield Split(made, store, prefill, decode, aggregated, split, whole)


@pytest.mark.parametrize("num_tokens", [1, 40, 64, 150])
def test_prefill_computes_the_whole_prompt_and_decode_none_of_it(
    services: Split, num_tokens: int
) -> None:
    prefill, decode = services.prefill, services.decode
    computed = prefill.prompt_tokens("local_compute")
    received = decode.prompt_tokens("external_kv_transfer")

    answer = services.split.complete(
        prompt(num_tokens, salt=num_tokens), max_tokens=8, temperature=0, ignore_eos=True
    )

    assert answer["usage"]["completion_tokens"] == 8
    assert prefill.prompt_tokens("local_compute") - computed == num_tokens
    until(
        lambda: decode.prompt_tokens("external_kv_transfer") - received == num_tokens,
        "decode takes the whole prompt from the store",
    )
    assert decode.prompt_tokens("local_compute") == 0
    assert decode.metric("diptych:kv_load_failures_total") == 0


@of_every_sampling
@pytest.mark.parametrize("num_tokens", [5, 130])
def test_the_answer_is_that_of_one_engine(
    services: Split, num_tokens: int, sampling: dict[str, Any]
) -> None:
    check_equal(services.split, services.whole, num_tokens, sampling)


def test_requests_side_by_side_get_the_answers_they_get_alone(services: Split) -> None:
    check_side_by_side(services.split)
    assert services.decode.prompt_tokens("local_compute") == 0


def test_one_token_needs_no_decode_worker(services: Split) -> None:
    received = services.decode.prompt_tokens("external_kv_transfer")
    answer = services.split.complete(prompt(20, salt=3), max_tokens=1, temperature=0)
    assert answer["usage"]["completion_tokens"] == 1
    assert services.decode.prompt_tokens("external_kv_transfer") == received


def test_a_client_that_leaves_frees_its_blocks_everywhere(services: Split) -> None:
    ids = prompt(100, salt=4)
    generated = services.decode.metric("vllm:generation_tokens_total")
    with services.split.streaming(ids, max_tokens=900, temperature=0, ignore_eos=True) as events:
        for _ in range(5):
            assert json.loads(next(events))["choices"]
        services.decode.arm("engine.step")  # it must not be done before it was looked at
        until(lambda: services.decode.is_at("engine.step"), "decode is in the middle of it")
        assert services.decode.metric("vllm:num_requests_running") == 1
    services.decode.go_on()
    for worker in (services.prefill, services.decode):
        until(lambda w=worker: w.all_blocks_free, f"{worker.command} frees its blocks")
        assert worker.metric("vllm:num_requests_running") == 0
    assert services.decode.metric("vllm:generation_tokens_total") - generated < 800


def test_a_dead_store_makes_requests_slower_not_wrong_and_one_that_returns_is_used(
    services: Split,
) -> None:
    ids = prompt(140, salt=6)
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = services.whole.complete(ids, **fields)
    services.store.kill()

    assert normal(services.split.complete(ids, **fields)) == normal(expected)
    assert services.decode.prompt_tokens("local_compute") == len(ids)

    services.store.start()
    services.store.wait_ready()
    received = services.decode.prompt_tokens("external_kv_transfer")

    def used_again() -> bool:
        services.split.complete(prompt(20, salt=int(time.monotonic() * 1000)), **fields)
        return services.decode.prompt_tokens("external_kv_transfer") > received

    until(used_again, "the store that came back is used")


def test_workers_leave_cleanly(services: Split) -> None:
    for worker in (services.prefill, services.decode, services.aggregated):
        assert worker.process is not None
        engine = child_of(worker.process.pid)
        assert worker.stop() == 0, worker.log.read_text()
        assert not Path(f"/proc/{engine}").exists()


def child_of(pid: int) -> int:
    """The process's one child."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
