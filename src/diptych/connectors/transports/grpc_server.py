"""The source's side of the gRPC transport."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from diptych.addresses import check_bindable
from diptych.connectors.transports.base import Memory
from diptych.connectors.transports.tcp_wire import TlsFiles
from diptych.errors import ConfigError
from diptych.proto import transfer_pb2, transfer_pb2_grpc
from diptych.rpc import SERVER_OPTIONS

TOKEN_KEY = "diptych-transfer-token"
PIECE_BYTES = 1 << 20
_THREADS = 4
_MAX_READS = 64
_STOP_S = 1.0


class GrpcServer:
    """Listens and serves on threads of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        regions: Mapping[str, Memory],
        token: str,
        tls: TlsFiles | None,
    ) -> None:
        """Bind and serve; `port` is known afterwards.

        Raises:
            ConfigError: the address cannot be bound.
        """
        check_bindable(host, port)
        self._server: Any = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-grpc-serve"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=_MAX_READS,
        )
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = int(self._server.add_insecure_port(shown))
            else:
                authority, key, certificate = tls.pem()
                credentials = grpc.ssl_server_credentials(
                    [(key, certificate)], authority, require_client_auth=True
                )
                self.port = int(self._server.add_secure_port(shown, credentials))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {shown}: {error}", param="port") from error
        add_to_server: Any = transfer_pb2_grpc.add_TransferServicer_to_server
        add_to_server(_Servicer(regions, token), self._server)
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(_STOP_S)


class _Servicer:
    """Answers with copies of the regions' bytes."""

    def __init__(self, regions: Mapping[str, Memory], token: str) -> None:
        self._regions = regions
        self._token = token

    def Read(
        self, request: transfer_pb2.ReadRequest, context: Any
    ) -> Iterator[transfer_pb2.ReadPiece]:
        shown = str(dict(context.invocation_metadata()).get(TOKEN_KEY, ""))
        if not hmac.compare_digest(shown.encode(), self._token.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this engine's")
        memory = self._regions.get(request.region)
        if memory is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such region")
            return
        runs = list(zip(request.offsets, request.lengths, strict=False))
        alike = len(request.offsets) == len(request.lengths)
        if not alike or any(offset + length > memory.num_bytes for offset, length in runs):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "a run lies outside the region")
        yield from _pieces(memory, runs)


def _pieces(memory: Memory, runs: list[tuple[int, int]]) -> Iterator[transfer_pb2.ReadPiece]:
    """The runs' bytes; short runs share a piece."""
    buffer, used = memoryview(bytearray(PIECE_BYTES)), 0
    for offset, length in runs:
        while length:
            size = min(length, PIECE_BYTES - used)
            memory.load(offset, buffer[used : used + size])
            offset, length, used = offset + size, length - size, used + size
            if used == PIECE_BYTES:
                yield transfer_pb2.ReadPiece(data=bytes(buffer))
                used = 0
    if used:
        yield transfer_pb2.ReadPiece(data=bytes(buffer[:used]))
