"""The KvStore service: messages to the object table and back. Batches in, one status per item."""

from __future__ import annotations

import heapq
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from diptych.errors import InvalidRequestError, StaleTicketError
from diptych.fault_points import reach
from diptych.proto import kvstore_pb2 as pb
from diptych.proto import kvstore_pb2_grpc
from diptych.services.kvstore.arrivals import Arrivals
from diptych.services.kvstore.checks import Checker
from diptych.services.kvstore.object_types import Found, Pin, Reservation, Status
from diptych.services.kvstore.replicator import Replicator
from diptych.services.kvstore.stats import store_stats
from diptych.services.kvstore.tiers import Tiers

MAX_BATCH = 4096
_MAX_WAIT_S = 1.0
_PINS = {
    pb.PIN_LEVEL_NONE: Pin.NONE,
    pb.PIN_LEVEL_SOFT: Pin.SOFT,
    pb.PIN_LEVEL_HARD: Pin.HARD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddresses:
    """Who this node is and where its bytes can be moved; fields as `StoreNode`."""

    node_id: str
    incarnation: str
    boot_id: str
    memory_socket: str
    stream_address: str
    access_token: bytes


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """One node. Runs on the loop that owns the table; only what reads bytes waits for threads."""

    def __init__(
        self, tiers: Tiers, checker: Checker, replicator: Replicator, node: NodeAddresses
    ) -> None:
        self._tiers = tiers
        self._replicator = replicator
        self._table = tiers.table
        self._checker = checker
        self._node = node
        self._arrivals = Arrivals()

    async def GetNode(self, request: pb.GetNodeRequest, context: Any) -> pb.StoreNode:
        return pb.StoreNode(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            memory_socket=self._node.memory_socket,
            boot_id=self._node.boot_id,
            stream_address=self._node.stream_address,
            pool_bytes=self._table.pool_bytes,
            access_token=self._node.access_token,
        )

    async def PutStart(self, request: pb.PutStartRequest, context: Any) -> pb.PutStartResponse:
        self._check_incarnation(request.incarnation)
        _check_batch(request.items)
        reach("store.put_start")
        items = [(i.key, i.num_bytes) for i in request.items]
        reserved = self._tiers.put_start(items, request.tenant)
        ttl_ms = int(self._table.put_ttl_s * 1000)
        return pb.PutStartResponse(reservations=[_reservation(r, ttl_ms) for r in reserved])

    async def PutEnd(self, request: pb.PutEndRequest, context: Any) -> pb.PutEndResponse:
        _check_batch(request.items)
        reach("store.put_end")
        put_ids = [i.put_id for i in request.items]
        keys = self._table.put_keys(put_ids) if self._arrivals.awaited else []
        statuses = self._tiers.put_end([(i.put_id, i.checksum) for i in request.items])
        self._arrivals.note(keys)
        return pb.PutEndResponse(statuses=map(_wire, statuses))

    async def PutRevoke(self, request: pb.PutRevokeRequest, context: Any) -> pb.PutRevokeResponse:
        _check_batch(request.put_ids)
        return pb.PutRevokeResponse(statuses=map(_wire, self._table.put_revoke(request.put_ids)))

    async def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        self._check_incarnation(request.incarnation)
        _check_batch(request.keys)
        found = await self._get(request)
        reach("store.got")
        return pb.GetResponse(
            results=[
                _result(f, self._replicator.note_read(key) if f.num_bytes else 0)
                for key, f in zip(request.keys, found, strict=True)
            ]
        )

    async def VerifyLease(
        self, request: pb.VerifyLeaseRequest, context: Any
    ) -> pb.VerifyLeaseResponse:
        _check_batch(request.lease_ids)
        statuses = self._table.verify(request.lease_ids, request.renew_ms / 1000)
        return pb.VerifyLeaseResponse(statuses=map(_wire, statuses))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        _check_batch(request.lease_ids)
        reach("store.release")
        return pb.ReleaseResponse(statuses=map(_wire, self._table.release(request.lease_ids)))

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:
        _check_batch(request.keys)
        return pb.ExistsResponse(present=self._tiers.exists(request.keys))

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.StoreStats:
        return store_stats(self._tiers, self._checker, self._replicator)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        _check_batch(request.keys)
        if request.level not in _PINS:
            raise InvalidRequestError("the pin level is not set", param="level")
        statuses = self._table.pin(request.keys, _PINS[request.level])
        return pb.PinResponse(statuses=map(_wire, statuses))

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        _check_batch(request.keys)
        return pb.CheckResponse(statuses=map(_wire, await self._checker.check(request.keys)))

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:
        _check_batch(request.keys)
        keys = list(self._tiers.inventory()) if request.all else request.keys
        statuses = self._tiers.drop(keys)
        return pb.EvictResponse(num_objects=statuses.count(Status.OK))

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        limit = min(request.limit or MAX_BATCH, MAX_BATCH)
        inventory = self._tiers.inventory()
        keys = heapq.nsmallest(limit, (key for key in inventory if key > request.after))
        return pb.ListResponse(
            objects=[
                pb.StoredObject(
                    key=key, num_bytes=inventory[key].num_bytes, tier=inventory[key].tier
                )
                for key in keys
            ]
        )

    async def _get(self, request: pb.GetRequest) -> list[Found]:
        """As the tiers'. Who waits for objects asks for the same again and again: what is not
        there yet is no miss."""
        lease_s = request.lease_ms / 1000
        if not request.wait_ms:
            return await self._tiers.get(request.keys, lease_s)
        present = self._tiers.exists(request.keys)
        if not any(present):
            wait_s = min(request.wait_ms / 1000, _MAX_WAIT_S)
            await self._arrivals.wait(request.keys, wait_s)
            present = self._tiers.exists(request.keys)
        there = [key for key, is_there in zip(request.keys, present, strict=True) if is_there]
        found = iter(await self._tiers.get(there, lease_s)) if there else iter(())
        return [next(found) if is_there else Found(Status.NOT_FOUND) for is_there in present]

    def _check_incarnation(self, wanted: str) -> None:
        if wanted and wanted != self._node.incarnation:
            raise StaleTicketError("the store has restarted since: ask GetNode again")


def _check_batch(items: Sized) -> None:
    if len(items) > MAX_BATCH:
        raise InvalidRequestError(f"a batch holds at most {MAX_BATCH} items, not {len(items)}")


def _wire(status: Status) -> Any:
    """An `ItemStatus`: the numbers are the same."""
    return int(status)


def _reservation(reserved: Reservation, ttl_ms: int) -> pb.PutReservation:
    if not reserved.num_bytes:
        return pb.PutReservation(status=_wire(reserved.status), checksum=reserved.checksum)
    return pb.PutReservation(
        status=_wire(reserved.status),
        put_id=reserved.put_id,
        placement=pb.Placement(offset_bytes=reserved.offset, num_bytes=reserved.num_bytes),
        ttl_ms=ttl_ms,
    )


def _result(found: Found, num_copies: int) -> pb.GetResult:
    if not found.num_bytes:
        return pb.GetResult(status=_wire(found.status))
    return pb.GetResult(
        status=_wire(found.status),
        placement=pb.Placement(offset_bytes=found.offset, num_bytes=found.num_bytes),
        checksum=found.checksum,
        lease_id=found.lease_id,
        # rounded down: the reader must not believe in more than it has
        lease_ms=int(found.lease_s * 1000),
        num_copies=num_copies,
    )
