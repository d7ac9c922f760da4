"""Where a process can listen, and what it tells others of it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from diptych.errors import AddressError, ConfigError

_WILDCARDS = ("0.0.0.0", "::", "")
# addresses of documentation: no packet goes there, but there is a route where there is a network
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def check_bindable(host: str, port: int) -> None:
    """Raise a clear error if nobody could listen on `host:port` now.

    Raises:
        ConfigError: in use, not permitted, or no address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use by another process"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="port") from error


def reachable_address(
    host: str, port: int, advertised: str | None, directory_url: str | None = None
) -> str:
    """host:port that others are told.

    A wildcard host becomes the address of the interface that leads to the directory, or to the
    world. An address that is good on this machine only is told to nobody elsewhere.

    Args:
        host: what the process listens on.
        advertised: what the operator says; taken as it is.
        directory_url: redis:// URL of the directory through which peers find this process.

    Raises:
        AddressError: there is no address that peers could reach.
    """
    if advertised is not None:
        return advertised
    directory = _host_of(directory_url)
    chosen = host
    if host in _WILDCARDS:
        chosen = _interface_towards(directory, socket.AF_INET6 if host == "::" else 0)
    if _is_local(chosen) and (host in _WILDCARDS or not _is_local(directory)):
        raise AddressError(
            f"others cannot reach this process: it listens on {host or '0.0.0.0'}, and {chosen} is "
            "an address of this machine alone; give --advertise-address HOST:PORT, or listen on an "
            "address of the network (--host 0.0.0.0: on all)",
            param="advertise_address",
        )
    return f"[{chosen}]:{port}" if ":" in chosen else f"{chosen}:{port}"


def _host_of(url: str | None) -> str:
    """The directory's host; this machine where there is no directory."""
    return (urlsplit(url).hostname if url else None) or "127.0.0.1"


def _interface_towards(host: str, family: int) -> str:
    """The local address of the route to a host, or to the world where that host is local."""
    targets = [host, *_ANYWHERE] if not _is_local(host) else _ANYWHERE
    for target in targets:
        try:
            kind, _, _, _, address = socket.getaddrinfo(target, 9, family, socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # chooses a route; nothing is sent
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def _is_local(host: str) -> bool:
    """Whether a host is this machine, as seen from itself only."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_link_local or address.is_unspecified
