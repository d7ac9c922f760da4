"""Copies hot objects to the next nodes of their order, in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol, Self

from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_results import Outcome, PutItem, PutResult
from diptych.connectors.store_ring import ranked
from diptych.registry import StoreRecord
from diptych.services.kvstore.heat import HeatMap
from diptych.services.kvstore.object_types import Place
from diptych.services.kvstore.objects import ObjectTable
from diptych.tasks import end_task

_log = logging.getLogger(__name__)

_MAX_QUEUED = 1024
_CALL_S = 2.0
# An object is not looked at again for so long after it was copied.
_REST_S = 10.0
_MAX_KNOWN = 8192


class Peers(Protocol):
    """The store's nodes, this one included."""

    @property
    def members(self) -> dict[str, StoreRecord]: ...


class Replicator:
    """`async with`: hears of every read, and copies what is read too often for one node."""

    def __init__(
        self, node_id: str, table: ObjectTable, pool: memoryview, peers: Peers, heat: HeatMap
    ) -> None:
        self.copies_total = 0
        self._heat = heat
        self._node_id = node_id
        self._table = table
        self._pool = pool
        self._peers = peers
        self._queue: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue(_MAX_QUEUED)
        self._rests_until: dict[bytes, float] = {}
        self._clients: dict[str, StoreClient] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="replicator")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_task(self._task)
        for client in self._clients.values():
            client.close()

    def note_read(self, key: bytes) -> int:
        """Count a read; returns how many nodes should have the object."""
        if len(self._peers.members) < 2:
            return 1
        copies = self._heat.note_read(key)
        if copies > 1:
            self._want(key, copies)
        return copies

    def _want(self, key: bytes, num_copies: int) -> None:
        now = time.monotonic()
        if self._rests_until.get(key, 0.0) > now or self._queue.full():
            return
        if len(self._rests_until) >= _MAX_KNOWN:
            self._rests_until.clear()
        self._rests_until[key] = now + _REST_S
        self._queue.put_nowait((key, num_copies))

    async def _run(self) -> None:
        while True:
            key, num_copies = await self._queue.get()
            try:
                await self._copy(key, num_copies)
            except Exception:
                _log.exception("replicator")

    async def _copy(self, key: bytes, num_copies: int) -> None:
        members = self._peers.members
        order = ranked(key, members)
        if order[:1] != [self._node_id]:
            return  # a copy itself, or no owner any more
        for node_id in order[1:num_copies]:
            place = self._table.hold(key)
            if place is None:
                return
            client = self._client(members[node_id].address, members)
            sending = asyncio.ensure_future(asyncio.to_thread(self._send, client, place))
            try:
                sent = await asyncio.shield(sending)
            except asyncio.CancelledError:
                await asyncio.wait([sending])  # the thread reads the pool until it is done
                raise
            finally:
                self._table.unhold(key, place.offset)
            if sent.outcome is Outcome.CORRUPT:
                _log.warning("an object of %d bytes is damaged and is removed", place.num_bytes)
                self._table.drop([key])
                return
            self.copies_total += sent.stored

    def _send(self, client: StoreClient, place: Place) -> PutResult:
        """A copy has the bytes that the object was stored with, or there is none."""
        with self._pool[place.offset : place.offset + place.num_bytes] as source:
            item = PutItem.of(place.key, source, place.checksum)
            [result] = client.put_many([item], _CALL_S, place.tenant)
        return result

    def _client(self, address: str, members: dict[str, StoreRecord]) -> StoreClient:
        known = {member.address for member in members.values()}
        for old in self._clients.keys() - known:
            self._clients.pop(old).close()
        if address not in self._clients:
            self._clients[address] = StoreClient(address)
        return self._clients[address]
