"""The StoreConnector against a real store node in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from diptych.config import EngineConfig, KVTransferConfig
from diptych.connectors.factory import make_scheduler_connector, make_worker_connector
from diptych.connectors.page_orders import PageStore
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.store import ServiceStore
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.errors import ConfigError
from tests.connectors.engines import OUR_BLOCKS, PROMPT, Engine, running
from tests.connectors.fakes import NAMESPACE, consumer, make_layout, producer, same_kv
from tests.services.test_kvstore import Node, patient, running_node

QUICK = TransferLimits(transfer_timeout_s=0.5, retry_s=0.05)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node


def opener(node: Node, transport: str = "auto", timeout_s: float = 60.0) -> PageStore:
    return ServiceStore(patient(node.address, timeout_s, transport=transport))


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_a_prompt_moves_through_the_store(node: Node, transport: str) -> None:
    prompt = [*transport.encode(), *PROMPT]
    prefill = Engine(lambda: opener(node, transport), 16, seed=1)
    decode = Engine(lambda: opener(node, transport), 64)
    with running(prefill, decode):
        commit = prefill.send(producer("r", prompt))
        assert commit.num_tokens == len(prompt)
        assert not decode.load(consumer("r", prompt, commit)).failed_recving
        ours, theirs = (prefill.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS)
        assert same_kv(ours, theirs, 0, len(prompt))


def test_what_another_writer_stored_is_named_by_its_own_checksum(node: Node) -> None:
    prompt = [3, *PROMPT]
    first, second = Engine(lambda: opener(node), seed=1), Engine(lambda: opener(node), seed=2)
    decode = Engine(lambda: opener(node))
    with running(first, second, decode):
        first.send(producer("r", prompt))
        commit = second.send(producer("r", prompt))
        assert commit.num_tokens == len(prompt)
        assert not decode.load(consumer("r", prompt, commit)).failed_recving
        assert same_kv((first.cache, OUR_BLOCKS), (decode.cache, OUR_BLOCKS), 0, len(prompt))


def test_a_full_store_covers_a_prefix() -> None:
    with running_node(pool_bytes=1 << 20) as small:
        # 3 KiB a token: the prompt does not fit
        prefill = Engine(lambda: opener(small), seed=1, head_dim=64)
        with running(prefill):
            commit = prefill.send(producer("r", [*range(480)]))
            assert 0 < commit.num_tokens < 480
            assert commit.num_tokens % 64 == 0


def test_a_store_that_dies_costs_a_recompute_on_both_sides() -> None:
    with running_node() as node:
        prefill = Engine(lambda: opener(node), seed=1)
        decode = Engine(lambda: opener(node))
        with running(prefill, decode):
            commit = prefill.send(producer("r", PROMPT))
            node.process.kill()
            node.process.wait()
            assert decode.load(consumer("r", PROMPT, commit), 32).failed_recving == {"r": 32}
            assert prefill.send(producer("s", [1, *PROMPT])).num_tokens == 0


def test_a_store_that_hangs_is_given_up_at_the_deadline() -> None:
    with running_node() as node:
        decode = Engine(lambda: opener(node, timeout_s=0.3), limits=QUICK)
        prefill = Engine(lambda: opener(node), seed=1)
        with running(prefill, decode):
            commit = prefill.send(producer("r", PROMPT))
            node.process.send_signal(signal.SIGSTOP)
            assert decode.load(consumer("r", PROMPT, commit)).failed_recving == {"r": 0}


def test_the_factory_makes_both_halves_and_needs_an_address(node: Node) -> None:
    def config(**extra: object) -> EngineConfig:
        transfer = KVTransferConfig(kv_connector="StoreConnector", kv_connector_extra_config=extra)
        return EngineConfig(kv_transfer_config=transfer)

    layout = make_layout(16)
    with pytest.raises(ConfigError, match="kvstore"):
        make_worker_connector(config())
    good = config(kvstore=node.address, transfer_timeout_s=2)
    assert isinstance(make_scheduler_connector(good, layout, NAMESPACE), PageConnectorScheduler)
    worker = make_worker_connector(good)
    assert worker is not None
    worker.shutdown()
