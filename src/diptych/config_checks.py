"""Checks that several configuration dataclasses share; each error names the field and its value."""

from __future__ import annotations

import math
from typing import Any

from diptych.errors import ConfigError


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def check_positive(config: Any, *names: str) -> None:
    """Numbers above 0; None, for a value that is chosen later, passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be positive, not {value}")


def check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must not be negative, not {value}")


def check_ports(config: Any, *names: str) -> None:
    """TCP ports, all different; any number of them may be 0, which takes a free one."""
    seen: dict[int, str] = {}
    for name in names:
        port = getattr(config, name)
        if not 0 <= port <= 65535:
            raise ConfigError(f"{name} must be 0 to 65535, not {port}")
        if port and port in seen:
            raise ConfigError(f"{seen[port]} and {name} cannot both be {port}")
        seen[port] = name


def check_address(name: str, address: str | None) -> None:
    """`host:port`, with an IPv6 host in brackets; None passes."""
    if address is None:
        return
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plausible = host and (bracketed or ":" not in host) and port.isascii() and port.isdigit()
    if not plausible or not 0 < int(port) <= 65535:
        raise ConfigError(f"{name} must be host:port, not {address!r}")
