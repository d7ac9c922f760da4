"""StoreConnector: objects in the KV-store service, found by a hand-off's commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from diptych.connectors.page_orders import Outgoing
from diptych.connectors.store_move import not_again
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult
from diptych.connectors.store_session import Sink
from diptych.errors import TransferError


class Client(Protocol):
    """One node or many: `StoreClient`, `StoreCluster`."""

    def put_many(
        self, items: Sequence[PutItem], timeout_s: float | None = None, tenant: str = ""
    ) -> list[PutResult]: ...
    def get_many(
        self,
        keys: Sequence[bytes],
        sink: Sink,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[GetResult]: ...
    def pools(self) -> list[memoryview]: ...
    def close(self) -> None: ...


class ServiceStore:
    """The store service as a `PageStore`. What it cannot do is a miss, not an error."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put_many(self, items: Sequence[Outgoing], tenant: str) -> list[int | None]:
        results = self._client.put_many([PutItem(*item) for item in items], tenant=tenant)
        # an earlier writer's bytes may differ in the last bits: the commit carries their checksum
        known = (Outcome.OK, Outcome.EXISTS)
        checksums = [r.checksum if r.outcome in known else None for r in results]
        unknown = [
            i for i, r in enumerate(results) if r.outcome is Outcome.EXISTS and not r.checksum
        ]
        if unknown:
            read = self._client.get_many([items[i].key for i in unknown], lambda i, view: None)
            for i, result in zip(unknown, read, strict=True):
                checksums[i] = result.checksum if result.outcome is Outcome.OK else None
        return checksums

    def get_many(
        self,
        items: Sequence[tuple[bytes, int]],
        sink: Callable[[int, memoryview], object],
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[int | None]:
        def take(index: int, view: memoryview) -> object:
            return sink(index, view) if view.nbytes == items[index][1] else None

        keys = [key for key, _ in items]
        results = self._client.get_many(keys, take, wait_s=wait_s, goes_on=goes_on)
        if wait_s and all(r.outcome is Outcome.UNAVAILABLE for r in results):
            raise TransferError("the KV store does not answer")  # nothing is to be waited for
        return [
            r.checksum if r.outcome is Outcome.OK and r.num_bytes == num_bytes else None
            for r, (_, num_bytes) in zip(results, items, strict=True)
        ]

    def pools(self) -> list[memoryview]:
        return self._client.pools()

    def close(self) -> None:
        self._client.close()
