"""Which transports a process opens, by name and in order of preference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.connectors.transports.base import Transport
from diptych.connectors.transports.tcp_wire import TlsFiles
from diptych.errors import ConfigError, TransferError

_log = logging.getLogger(__name__)

AUTO = "auto"
NAMES = ("cuda_ipc", "nixl", "shm", "tcp", "grpc")
# between processes of one host alone, or under TLS
_PRIVATE = ("cuda_ipc", "shm", "tcp", "grpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """Where a process listens for readers.

    Attributes:
        device: of the KV pool, `cpu` or `cuda:N`.
        host: address of the TCP and gRPC transports; ports are free ones unless given.
        advertised_host: what peers are told instead, where it differs.
        tls: certificates for mutual TLS; with them nothing travels in the clear.
    """

    device: str = "cpu"
    host: str = "127.0.0.1"
    tcp_port: int = 0
    grpc_port: int = 0
    advertised_host: str | None = None
    directory_url: str | None = None
    tls: TlsFiles | None = None


def check_names(names: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: there is no name, or one is not known.
    """
    unknown = [name for name in names if name not in (*NAMES, AUTO)]
    if unknown or not names:
        raise ConfigError(f"transports are {', '.join((AUTO, *NAMES))}, not {list(names)}")


def open_transports(
    names: Sequence[str] = (AUTO,), settings: TransportSettings | None = None
) -> list[Transport]:
    """Open transports in order of preference.

    Args:
        names: of NAMES; `auto` stands for all that are of use here: `cuda_ipc` where there is a
            GPU; NIXL is left out where there is neither a GPU nor RDMA, for there it is slower than
            `shm` and `tcp` and wakes often, and where TLS is on, for it knows none.

    Raises:
        ConfigError: an unknown name, or a setting that a transport cannot use.
        TransferError: none of them works here.
    """
    settings = settings or TransportSettings()
    check_names(names)
    opened: list[Transport] = []
    chosen = list(dict.fromkeys(names))
    if AUTO in names:
        useful = [name for name in _useful(settings.device) if not settings.tls or name in _PRIVATE]
        chosen = [name for name in NAMES if name in useful or name in names]
    reasons = []
    for name in chosen:
        try:
            opened.append(_MAKERS[name](settings))
        except TransferError as error:
            level = logging.WARNING if name in names else logging.INFO
            _log.log(level, "no transfers over %s: %s", name, error.message)
            reasons.append(f"{name}: {error.message}")
    if not opened:
        raise TransferError(f"no transport works here ({'; '.join(reasons)})")
    return opened


def _useful(device: str) -> tuple[str, ...]:
    if device != "cpu":
        return NAMES
    return NAMES[1:] if has_rdma() else NAMES[2:]


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    return any(Path("/sys/class/infiniband").glob("*"))


def _cuda_ipc(settings: TransportSettings) -> Transport:
    from diptych.connectors.transports.cuda_ipc import CudaIpcTransport

    if settings.device == "cpu":
        raise TransferError("the KV pool lies on no GPU")
    return CudaIpcTransport()


def _nixl(settings: TransportSettings) -> Transport:
    from diptych.connectors.transports.nixl import NixlTransport

    return NixlTransport()


def _shm(settings: TransportSettings) -> Transport:
    from diptych.connectors.transports.shm import ShmTransport

    return ShmTransport()


def _tcp(settings: TransportSettings) -> Transport:
    from diptych.connectors.transports.tcp import TcpTransport

    return TcpTransport(
        settings.host,
        settings.tcp_port,
        advertised_host=settings.advertised_host,
        directory_url=settings.directory_url,
        tls=settings.tls,
    )


def _grpc(settings: TransportSettings) -> Transport:
    from diptych.connectors.transports.grpc_bytes import GrpcTransport

    return GrpcTransport(
        settings.host,
        settings.grpc_port,
        advertised_host=settings.advertised_host,
        directory_url=settings.directory_url,
        tls=settings.tls,
    )


_MAKERS: dict[str, Callable[[TransportSettings], Transport]] = {
    "cuda_ipc": _cuda_ipc,
    "nixl": _nixl,
    "shm": _shm,
    "tcp": _tcp,
    "grpc": _grpc,
}
