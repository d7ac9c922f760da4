"""Several store nodes under a whole system: found by the registry, and lost one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.embedded_redis import EmbeddedRedis
from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [(11 * i * i + i) % 200 + 3 for i in range(330)]
FIELDS = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}


@dataclass
class System:
    """Two stores, one prefill and one decode worker that know them by the registry alone."""

    api: Api
    decode: ServiceProcess
    stores: list[ServiceProcess]
    server: EmbeddedRedis
    link: Path

    def answer(self) -> str:
        return str(self.api.complete(PROMPT, **FIELDS)["choices"][0]["text"])

    def handed_over(self) -> float:
        return self.decode.prompt_tokens("external_kv_transfer")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("nodes")
    link, server = directory / "redis.sock", EmbeddedRedis()
    link.symlink_to(server.start().removeprefix("unix://"))
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        made.redis = {"redis": f"unix://{link}", "heartbeat_s": 0.2, "liveness_s": 10.0}
        stores = [made.kvstore(node_id=name)[0] for name in ("a", "b")]
        made.wait_ready()
        settings = {"enable_prefix_caching": False}
        _, first = made.worker("prefill", **settings)
        decode, second = made.worker("decode", **settings)
        router, api = made.router(first, second)
        made.wait_ready()
        until(lambda: router.metric("diptych:workers_ready") >= 2, "all workers are connected")
        yield System(api, decode, stores, server, link)
    server.stop()


@pytest.fixture(scope="module")
def expected(system: System) -> str:
    return system.answer()


def test_a_hand_off_is_spread_over_the_nodes(system: System, expected: str) -> None:
    assert expected
    counts = [store.metric("diptych:kvstore_objects") for store in system.stores]
    assert all(counts)
    assert sum(counts) == 6  # five pages and the tail
    assert system.handed_over() == len(PROMPT)


def test_without_redis_everything_goes_on(system: System, expected: str) -> None:
    system.server.kill()
    before = system.handed_over()
    assert system.answer() == expected
    assert system.handed_over() == before + len(PROMPT)
    system.server.stop()
    system.link.unlink()
    system.link.symlink_to(system.server.start().removeprefix("unix://"))


def test_of_two_nodes_one_is_enough(system: System, expected: str) -> None:
    lost = system.stores[0]
    lost.kill()
    assert system.answer() == expected

    def whole() -> bool:
        before = system.handed_over()
        assert system.answer() == expected
        return system.handed_over() == before + len(PROMPT)

    until(whole, "hand-offs go by the other node")
    lost.start()
    lost.wait_ready()
    until(lambda: system.answer() == expected and lost.metric("diptych:kvstore_objects") > 0,
          "the node has its share again")  # fmt: skip
