"""Prefill and decode as two real engines: a tiny model, and KV that moves through files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diptych.config import EngineConfig, KVTransferConfig
from diptych.engine.core import EngineCore, make_engine_core
from diptych.engine.request import EngineCoreRequest, KVCommit, KVTransferParams
from tests.engine.make_requests import make_request
from tests.tiny_models import make_tiny_model

PROMPT = [(7 * i) % 250 for i in range(150)]  # two pages and a tail
MakeCore = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_core(model: Path, tmp_path: Path) -> Iterator[MakeCore]:
    cores = []

    def make(*, connected: bool = True, **config: object) -> EngineCore:
        transfer = KVTransferConfig(
            kv_connector="SharedStorageConnector",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path / "kv")},
        )
        values = {
            "model": str(model),
            "num_kv_blocks": 80,
            "kv_transfer_config": transfer if connected else None,
            **config,
        }
        cores.append(make_engine_core(EngineConfig(**values)))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def run(core: EngineCore, request: EngineCoreRequest) -> tuple[list[int], KVCommit | None]:
    """The request's tokens and its commit."""
    core.add_request(request)
    tokens: list[int] = []
    commit = None
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline, "the engine does not come to an end"
        outputs = core.step()
        if outputs is not None:
            tokens += outputs.token_ids
            commit = next(iter(outputs.commits.values()), commit)
            assert not outputs.errors
        if core.is_waiting_for_transfers:
            time.sleep(0.001)
    return tokens, commit


def request(**fields: object) -> EngineCoreRequest:
    values = {"max_tokens": 12, "temperature": 0.8, "seed": 5, **fields}
    return make_request("a", PROMPT, **values)


def prefill(core: EngineCore) -> tuple[list[int], KVCommit]:
    tokens, commit = run(core, request(transfer=KVTransferParams(do_remote_decode=True)))
    assert commit is not None
    return tokens, commit


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block_sizes", [(16, 16), (64, 16), (16, 64)])
def test_the_split_answers_as_one_engine_does_and_decode_computes_no_prompt_token(
    make_core: MakeCore, block_sizes: tuple[int, int], ahead: bool
) -> None:
    whole, _ = run(make_core(connected=False), request())
    first = make_core(block_size=block_sizes[0], max_num_batched_tokens=48, async_scheduling=ahead)
    second = make_core(block_size=block_sizes[1], async_scheduling=ahead)

    token_1, commit = prefill(first)
    rest, _ = run(second, request(output=token_1, transfer=KVTransferParams(commit=commit)))

    assert token_1 + rest == whole
    assert commit.num_tokens == len(PROMPT)
    assert first.stats.prompt_tokens_local_compute == len(PROMPT)
    assert second.stats.prompt_tokens_local_compute == 0
    assert second.stats.prompt_tokens_external_kv_transfer == len(PROMPT)
    assert second.stats.num_free_kv_blocks == 80
    assert first.stats.num_free_kv_blocks == 80


@pytest.mark.parametrize("ahead", [False, True])
def test_lost_files_make_decode_slower_not_wrong(
    make_core: MakeCore, tmp_path: Path, ahead: bool
) -> None:
    whole, _ = run(make_core(connected=False), request())
    token_1, commit = prefill(make_core())
    shutil.rmtree(tmp_path / "kv")
    second = make_core(async_scheduling=ahead)
    rest, _ = run(second, request(output=token_1, transfer=KVTransferParams(commit=commit)))
    assert token_1 + rest == whole
    assert second.stats.prompt_tokens_local_compute == len(PROMPT)
    assert second.stats.num_kv_load_failures == 1


def test_any_worker_takes_over_after_any_token(make_core: MakeCore) -> None:
    whole, _ = run(make_core(connected=False), request())
    core = make_core(connected=False)
    for sent in (1, 5, 11):
        rest, _ = run(core, request(output=whole[:sent]))
        assert whole[:sent] + rest == whole
