"""A store node that lies: real sockets and a real gRPC server, answers as a test wants them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from diptych.connectors.store_wire import HELLO_BYTES, POOL_SIZE, boot_id, socket_name
from diptych.proto import kvstore_pb2 as pb
from diptych.proto import kvstore_pb2_grpc


class MemoryGiver:
    """A unix socket that hands a descriptor to everybody, and says that it has `num_bytes`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.address = f"@diptych-test-{os.urandom(8).hex()}"
        self._fd = fd
        self._num_bytes = num_bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, suppress(OSError):
                    client.recv(HELLO_BYTES)
                    socket.send_fds(client, [POOL_SIZE.pack(self._num_bytes)], [self._fd])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


class LyingNode(kvstore_pb2_grpc.KvStoreServicer):
    """What is right by itself; a test overrides what shall be wrong. `calls` counts questions."""

    def __init__(self, memory_socket: str, pool_bytes: int) -> None:
        self.calls = 0
        self.node = pb.StoreNode(
            node_id="liar",
            incarnation="i",
            memory_socket=memory_socket,
            boot_id=boot_id(),
            stream_address="127.0.0.1:1",
            pool_bytes=pool_bytes,
            access_token=b"t" * 32,
        )

    def GetNode(self, request: Any, context: Any) -> pb.StoreNode:
        return self.node

    def PutStart(self, request: Any, context: Any) -> pb.PutStartResponse:
        self.calls += 1
        return pb.PutStartResponse(
            reservations=[
                pb.PutReservation(
                    status=pb.ITEM_STATUS_OK,
                    put_id=5,
                    placement=pb.Placement(offset_bytes=0, num_bytes=item.num_bytes),
                    ttl_ms=600_000,
                )
                for item in request.items
            ]
        )

    def PutEnd(self, request: Any, context: Any) -> pb.PutEndResponse:
        return pb.PutEndResponse(statuses=[pb.ITEM_STATUS_OK] * len(request.items))

    def PutRevoke(self, request: Any, context: Any) -> pb.PutRevokeResponse:
        return pb.PutRevokeResponse()

    def Get(self, request: Any, context: Any) -> pb.GetResponse:
        self.calls += 1
        return pb.GetResponse(
            results=[
                pb.GetResult(
                    status=pb.ITEM_STATUS_OK,
                    placement=pb.Placement(offset_bytes=0, num_bytes=100),
                    lease_id=5,
                    lease_ms=600_000,
                )
                for _ in request.keys
            ]
        )

    def Release(self, request: Any, context: Any) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(statuses=[pb.ITEM_STATUS_OK] * len(request.lease_ids))

    def VerifyLease(self, request: Any, context: Any) -> pb.VerifyLeaseResponse:
        return pb.VerifyLeaseResponse(statuses=[pb.ITEM_STATUS_OK] * len(request.lease_ids))

    def Check(self, request: Any, context: Any) -> pb.CheckResponse:
        return pb.CheckResponse(statuses=[pb.ITEM_STATUS_OK] * len(request.keys))

    def Exists(self, request: Any, context: Any) -> pb.ExistsResponse:
        self.calls += 1
        return pb.ExistsResponse(present=[True] * len(request.keys))


@contextmanager
def served(node: LyingNode) -> Iterator[str]:
    """The node's address while it is served."""
    server = grpc.server(ThreadPoolExecutor(4))
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(node, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(60)
