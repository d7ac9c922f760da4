"""Where a process can listen, and what it tells others of it."""

from __future__ import annotations

import errno
import socket

from diptych.errors import ConfigError


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


def reachable_address(host: str, port: int, advertised: str | None) -> str:
    """host:port that others are told; a wildcard host becomes this machine's address."""
    if advertised is not None:
        return advertised
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostbyname(socket.gethostname())
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}"
