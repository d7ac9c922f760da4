"""Two real engine processes, and a relay between them in place of two worker services."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from diptych.config import EngineConfig, KVTransferConfig
from diptych.engine.control_messages import (
    Control,
    HandoffFigures,
    PeerDown,
    PeerLink,
    PeerUp,
)
from diptych.engine.core_client import EngineCoreClient
from diptych.engine.request import FinishReason, HandoffPeer, KVCommit, KVTransferParams
from diptych.errors import EngineDeadError
from tests.engine.make_requests import make_request

PREFILL, DECODE = "prefill-1", "decode-1"


class Worker:
    """One engine, and what it has said."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.client = EngineCoreClient()
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.commits: dict[str, KVCommit] = {}
        self.failures: dict[str, str] = {}
        self.links: dict[str, PeerLink] = {}
        self.figures = HandoffFigures()
        self._news = asyncio.Condition()

    async def start(self, config: EngineConfig) -> None:
        await self.client.start(config, startup_timeout_s=150)

    async def listen(self) -> None:
        with contextlib.suppress(EngineDeadError):
            async for outputs in self.client.outputs():
                at = 0
                for i, request_id in enumerate(outputs.request_ids):
                    count, first = outputs.token_counts[i], outputs.first_positions[i]
                    new = outputs.token_ids[at : at + count]
                    at += count
                    self.tokens.setdefault(request_id, []).extend(enumerate(new, first))
                    if outputs.finish_reasons[i]:
                        self.ends[request_id] = FinishReason(outputs.finish_reasons[i])
                    if i in outputs.commits:
                        self.commits[request_id] = outputs.commits[i]
                    if i in outputs.handoff_failures:
                        self.failures[request_id] = outputs.handoff_failures[i]
                async with self._news:
                    self._news.notify_all()

    async def until(self, done: Any, limit_s: float = 120.0) -> None:
        async with asyncio.timeout(limit_s), self._news:
            await self._news.wait_for(done)

    async def ended(self, request_id: str) -> None:
        await self.until(lambda: request_id in self.ends or request_id in self.commits)

    @property
    def num_free(self) -> int:
        return self.client.stats.num_free_kv_blocks

    async def all_free(self) -> None:
        """Until every block is back."""
        await self.until(lambda: self.num_free == self.client.info.num_kv_blocks)


class Relay:
    """Carries control messages; as badly as it is told."""

    def __init__(self, seed: int | None = None) -> None:
        """With a seed a third is lost, a third comes twice, and all comes late, in any order.

        What has all parts of `loses` in it never arrives.
        """
        self._random = None if seed is None else random.Random(seed)
        self.cut = False
        self.loses: tuple[bytes, ...] = ()

    async def carry(self, source: Worker, target: Worker) -> None:
        async with asyncio.TaskGroup() as late:
            async for message in source.client.controls():
                if isinstance(message, HandoffFigures):
                    source.figures = message
                    continue
                if isinstance(message, PeerLink):
                    source.links[message.peer] = message
                    continue
                assert message.peer == target.name
                for delay_s in self._fate(message.body):
                    late.create_task(self._deliver(source, target, message.body, delay_s))

    def _fate(self, body: bytes) -> list[float]:
        if self.cut or (self.loses and all(part in body for part in self.loses)):
            return []
        if self._random is None:
            return [0.0]
        count = self._random.choice((0, 1, 2))
        return [self._random.random() * 0.05 for _ in range(count)]

    async def _deliver(self, source: Worker, target: Worker, body: bytes, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        target.client.send_control(Control(source.name, body))


class Pair:
    """A prefill and a decode engine that know each other."""

    def __init__(self, relay: Relay) -> None:
        self.prefill, self.decode = Worker(PREFILL), Worker(DECODE)
        self.relay = relay

    def introduce(self) -> None:
        for one, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            one.client.send_control(PeerUp(other.name, other.client.info.handoff_cards))

    async def submit_prefill(self, name: str, prompt: list[int], **sampling: Any) -> None:
        params = KVTransferParams(
            do_remote_decode=True, peer=HandoffPeer(worker_id="d", incarnation=DECODE)
        )
        await self.prefill.client.submit(make_request(name, prompt, transfer=params, **sampling))

    async def submit_decode(
        self, name: str, prompt: list[int], ttl_s: float = 120.0, **sampling: Any
    ) -> None:
        params = KVTransferParams(peer=HandoffPeer(worker_id="p", incarnation=PREFILL), ttl_s=ttl_s)
        await self.decode.client.submit(make_request(name, prompt, transfer=params, **sampling))

    async def submit(self, name: str, prompt: list[int], **sampling: Any) -> None:
        await asyncio.gather(
            self.submit_decode(name, prompt, **sampling),
            self.submit_prefill(name, prompt, **sampling),
        )

    async def ended(self, name: str) -> None:
        await asyncio.gather(self.prefill.ended(name), self.decode.ended(name))

    async def all_free(self) -> None:
        await asyncio.gather(self.prefill.all_free(), self.decode.all_free())

    def answer(self, name: str) -> list[int]:
        """Tokens by position, each once."""
        both = self.prefill.tokens.get(name, []) + self.decode.tokens.get(name, [])
        assert [position for position, _ in both] == list(range(len(both)))
        return [token for _, token in both]

    def lose_prefill(self) -> None:
        self.decode.client.send_control(PeerDown(PREFILL))


def config(model: Path, role: str, **settings: Any) -> EngineConfig:
    """Settings that are not the engine's are the connector's. Unless they say otherwise it waits
    long: an engine that gets no time to run for seconds is neither gone nor silent."""
    settings = dict.fromkeys(("lease_s", "reserve_s", "read_s", "silence_s"), 60.0) | settings
    settings = dict.fromkeys(("verdict_s", "test_s"), 60.0) | settings
    settings = {"shortcut": False} | settings  # what is said passes the relay
    engine: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 64, "num_kv_blocks": 96}
    engine |= {"reserve_output": True, "device": "cpu", "attention_backend": "auto"}
    engine |= {name: settings.pop(name) for name in list(settings) if name in engine}
    return EngineConfig(
        model=str(model),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=512,
        num_threads=1,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DirectConnector", kv_role=role, kv_connector_extra_config=settings
        ),
        **engine,
    )


@contextlib.asynccontextmanager
async def running_pair(
    model: Path,
    *,
    seed: int | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[Pair]:
    pair = Pair(Relay(seed))
    workers = (pair.prefill, pair.decode)
    try:
        await asyncio.gather(
            pair.prefill.start(config(model, "kv_producer", **(prefill or {}))),
            pair.decode.start(config(model, "kv_consumer", **(decode or {}))),
        )
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(worker.listen()) for worker in workers]
            running += [
                tasks.create_task(pair.relay.carry(pair.prefill, pair.decode)),
                tasks.create_task(pair.relay.carry(pair.decode, pair.prefill)),
            ]
            pair.introduce()
            yield pair
            for task in running:
                task.cancel()
    finally:
        await asyncio.gather(*(worker.client.close() for worker in workers))
