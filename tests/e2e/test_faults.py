"""Workers die, return and freeze under a client that sees only latency."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [(7 * i * i + i) % 200 + 3 for i in range(100)]
FIELDS = {"max_tokens": 500, "temperature": 0, "ignore_eos": True}


class Pools:
    """One prefill and two decode workers behind one router."""

    def __init__(self, api: Api, prefill: ServiceProcess, decodes: list[ServiceProcess]) -> None:
        self.api = api
        self.prefill = prefill
        self.decodes = decodes

    def decoding(self) -> ServiceProcess:
        """The decode worker that runs a request now, at its next step: it would not be waited for
        by an answer that is nearly there."""
        for decode in self.decodes:
            decode.arm("engine.step")
        until(lambda: any(d.is_at("engine.step") for d in self.decodes), "one of them runs it")
        found = next(d for d in self.decodes if d.is_at("engine.step"))
        for decode in self.decodes:
            if decode is not found:
                decode.go_on()
        return found

    def answer_while(self, number: signal.Signals) -> str:
        """The whole streamed answer; its decode worker gets a signal after 20 pieces."""
        pieces: list[str] = []
        with self.api.streaming(PROMPT, **FIELDS) as events:
            for event in map(json.loads, events):
                assert "error" not in event
                pieces += [choice["text"] for choice in event["choices"]]
                if len(pieces) == 20:
                    self.hurt = self.decoding()
                    assert self.hurt.process is not None
                    self.hurt.process.send_signal(number)
                    self.hurt.go_on()
        return "".join(pieces)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    directory = tmp_path_factory.mktemp("faults")
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        made.silence_s = 5.0  # of those that these tests freeze
        _, store = made.kvstore()
        prefill, *addresses = made.worker("prefill", store=store)
        decodes = []
        for _ in range(2):
            decode, address = made.worker("decode", store=store)
            decodes.append(decode)
            addresses.append(address)
        router, api = made.router(*addresses)
        made.wait_ready()
        until(lambda: router.metric("diptych:workers_ready") >= 3, "all workers are connected")
        yield Pools(api, prefill, decodes)


@pytest.fixture(scope="module")
def expected(pools: Pools) -> str:
    return str(pools.api.complete(PROMPT, **FIELDS)["choices"][0]["text"])


def test_a_worker_told_to_stop_finishes_its_answer(pools: Pools, expected: str) -> None:
    assert pools.answer_while(signal.SIGTERM) == expected
    assert pools.hurt.process is not None
    assert pools.hurt.process.wait(150) == 0
    assert "drained; 0 requests left" in pools.hurt.log.read_text()
    pools.hurt.start()
    pools.hurt.wait_ready()


def test_an_answer_outlives_its_decode_worker(pools: Pools, expected: str) -> None:
    assert pools.answer_while(signal.SIGKILL) == expected
    assert pools.hurt.process is not None
    pools.hurt.process.wait()
    pools.hurt.start()
    pools.hurt.wait_ready()


def test_an_answer_outlives_a_frozen_decode_worker(pools: Pools, expected: str) -> None:
    assert pools.answer_while(signal.SIGSTOP) == expected
    assert pools.hurt.process is not None
    pools.hurt.process.send_signal(signal.SIGCONT)
    # once it wakes it must not compute for nobody
    until(lambda: pools.hurt.all_blocks_free, "the woken worker frees its blocks")


def test_without_prefill_workers_decode_workers_do_all(pools: Pools, expected: str) -> None:
    pools.prefill.kill()
    assert pools.api.complete(PROMPT, **FIELDS)["choices"][0]["text"] == expected


def test_a_prefill_worker_that_returns_is_used(pools: Pools) -> None:
    pools.prefill.start()
    pools.prefill.wait_ready()

    def used() -> bool:
        pools.api.complete(PROMPT, max_tokens=2, ignore_eos=True)
        return pools.prefill.metric("diptych:handoffs_out_total") > 0

    until(used, "the prefill worker hands over again")
