"""Two real engines over a store that loses, damages, delays and refuses: slower, never wrong."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import xxhash

from diptych.config import EngineConfig
from diptych.connectors.page_orders import Outgoing
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.shared_storage import FileStore
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.engine.core import EngineCore
from diptych.engine.executor import UniprocExecutor
from diptych.engine.request import EngineCoreRequest, KVCommit, KVTransferParams
from diptych.errors import TransferError
from tests.engine.make_requests import make_request
from tests.tiny_models import make_tiny_model

NUM_BLOCKS = 60
MAX_TOKENS = 6


class FlakyStore:
    """Files behind a line that one cannot trust."""

    def __init__(self, root: Path, seed: int) -> None:
        self._files = FileStore(root)
        self._random = Random(seed)

    def put_many(self, items: Sequence[Outgoing], tenant: str) -> list[int | None]:
        self._maybe_fail()
        stored = self._files.put_many(items)
        return [None if self._random.random() < 0.1 else checksum for checksum in stored]

    def get_many(
        self, items: Sequence[tuple[bytes, int]], sink: Callable[[int, memoryview], object]
    ) -> list[int | None]:
        self._maybe_fail()
        damaged: dict[int, int] = {}

        def take(index: int, view: memoryview) -> object:
            if self._random.random() < 0.15:
                half = view.nbytes // 2
                view = memoryview(bytes(view[-half:]) + bytes(view.nbytes - half))
                damaged[index] = xxhash.xxh3_64_intdigest(view)
            return sink(index, view)

        read = self._files.get_many(items, take)
        read = [damaged.get(index, checksum) for index, checksum in enumerate(read)]
        return [checksum if self._random.random() > 0.1 else None for checksum in read]

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        return

    def _maybe_fail(self) -> None:
        time.sleep(self._random.random() * 0.01)
        if self._random.random() < 0.1:
            raise TransferError("the line is cut")


@dataclass
class Answer:
    """What the client of one request has received."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    commit: KVCommit | None = None
    left: bool = False


def make_core(model: Path, store: FlakyStore | None, block_size: int = 16) -> EngineCore:
    config = EngineConfig(
        model=str(model),
        num_kv_blocks=NUM_BLOCKS * 16 // block_size,
        block_size=block_size,
        max_model_len=384,
        max_num_batched_tokens=96,
        num_threads=1,
    )
    if store is None:
        return EngineCore(config, UniprocExecutor(config))
    limits = TransferLimits(retry_s=0.005)
    executor = UniprocExecutor(config, PageConnectorWorker("Flaky", lambda: store, limits))
    return EngineCore(config, executor, PageConnectorScheduler(executor.kv_layout))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[EngineCore]:
    core = make_core(model, None)
    yield core
    core.close()


def request(name: str, answer: Answer, **fields: object) -> EngineCoreRequest:
    params = {"max_tokens": MAX_TOKENS, "temperature": 0.7, "seed": int(name), "ignore_eos": True}
    return make_request(name, answer.prompt, **params, **fields)


def step(core: EngineCore, answers: dict[str, Answer]) -> None:
    outputs = core.step()
    if outputs is None:
        return
    at = 0
    for entry, name in enumerate(outputs.request_ids):
        count = outputs.token_counts[entry]
        new = outputs.token_ids[at : at + count]
        at += count
        if not answers[name].left:
            assert count == 0 or outputs.first_positions[entry] == len(answers[name].tokens)
            answers[name].tokens += new
        if entry in outputs.commits:
            answers[name].commit = outputs.commits[entry]
    assert not outputs.errors


def drive(
    random: Random, prefill: EngineCore, decode: EngineCore, answers: dict[str, Answer]
) -> None:
    """Hand every request over as its commit comes; now and then a client leaves."""
    waiting, under_way = list(answers), set[str]()
    deadline = time.monotonic() + 120
    while waiting or prefill.has_work or decode.has_work:
        assert time.monotonic() < deadline, "the engines do not come to an end"
        if waiting and random.random() < 0.4:
            name = waiting.pop()
            transfer = KVTransferParams(do_remote_decode=True)
            prefill.add_request(request(name, answers[name], transfer=transfer))
        for core in (prefill, decode):
            if core.has_work:
                step(core, answers)
        for name, answer in answers.items():
            if answer.commit is not None and name not in under_way and not answer.left:
                under_way.add(name)
                transfer = KVTransferParams(commit=answer.commit)
                decode.add_request(request(name, answer, output=answer.tokens, transfer=transfer))
        if random.random() < 0.05 and sum(a.left for a in answers.values()) < 5:
            name = random.choice(list(answers))
            answers[name].left = True
            prefill.abort([name])
            decode.abort([name])


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_one_engine_and_no_block_is_lost(
    model: Path, whole: EngineCore, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    shared = [random.randrange(3, 250) for _ in range(200)]
    answers = {
        str(n): Answer(
            [*shared[: random.choice((0, 60, 128))], *random.choices(range(3, 250), k=90)]
        )
        for n in range(14)
    }
    stores = [FlakyStore(tmp_path, seed * 2 + n) for n in range(2)]
    prefill = make_core(model, stores[0])
    decode = make_core(model, stores[1], block_size=random.choice((16, 32, 64)))
    try:
        drive(random, prefill, decode, answers)
        for core in (prefill, decode):
            assert core.stats.num_free_kv_blocks == core.stats.num_kv_blocks
        failures = decode.stats.num_kv_load_failures + prefill.stats.num_kv_save_failures
        assert failures > 0, "nothing went wrong, so nothing was tested"
        assert decode.stats.prompt_tokens_external_kv_transfer > 0
    finally:
        prefill.close()
        decode.close()
    alone = {n: dataclasses.replace(a, tokens=[]) for n, a in answers.items() if not a.left}
    for name, answer in alone.items():
        whole.add_request(request(name, answer))
    while whole.has_work:
        step(whole, alone)
    assert len(alone) > 3
    for name, answer in alone.items():
        assert answers[name].tokens == answer.tokens, name
