"""Objects read where they lie: views into the mapped pool, good for as long as their leases hold.

Nothing is copied and no checksum is computed. Whoever uses the bytes verifies afterwards, before it
relies on what it made of them: the leases by `Leased.verify`, the bytes by the checksums.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_session import StoreSession
from diptych.connectors.store_transport import MappedMover
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb


class Leased:
    """What was found: `views[i]` is None for a key that is not there; read-only."""

    def __init__(
        self, session: StoreSession, mover: MappedMover, found: Sequence[pb.GetResult]
    ) -> None:
        self._session = session
        self.lease_ids = [f.lease_id for f in found if f.status == pb.ITEM_STATUS_OK]
        self.checksums = [f.checksum for f in found]
        self.views = [
            mover.view(f.placement.offset_bytes, f.placement.num_bytes)
            if f.status == pb.ITEM_STATUS_OK
            else None
            for f in found
        ]

    def verify(self, timeout_s: float = 2.0, renew_s: float = 0.0) -> bool:
        """Whether all leases have held until now; they last `renew_s` longer then.

        Raises:
            grpc.RpcError: the node does not answer.
            TransferError: it does not keep to the protocol.
        """
        return all(self._session.holds(self.lease_ids, time.monotonic() + timeout_s, renew_s))


@contextlib.contextmanager
def leased(client: StoreClient, keys: Sequence[bytes], timeout_s: float = 5.0) -> Iterator[Leased]:
    """Lease a batch of objects until the block ends; the views end with it.

    Raises:
        TransferError: the store is lost, or its pool is not mapped.
    """
    until = time.monotonic() + timeout_s

    def find(session: StoreSession) -> tuple[Leased | None]:
        if not isinstance(session.mover, MappedMover):
            return (None,)
        found = session.found(session.ask_get(keys, until), len(keys))
        return (Leased(session, session.mover, found),)

    [found] = client.attempt(find, timeout_s)
    if found is None:
        raise TransferError("the store's pool is not mapped here: its objects must be copied")
    try:
        yield found
    finally:
        for view in found.views:
            if view is not None:
                view.release()
        client.forget("Release", pb.ReleaseRequest(lease_ids=found.lease_ids))
