"""What a Redis URL may be: one server, or the master that Sentinels agree on.

`redis+sentinel://[user:password@]host:port[,host:port...]/service[/database]` names Sentinels;
user and password are the servers'. With `rediss+sentinel` both are spoken to by TLS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis import asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from diptych.errors import ConfigError

_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT = 26379
# Of a call's time that one Sentinel may take: of several that are silent the next is asked in time.
_SENTINEL_PART = 0.25


@dataclass(frozen=True, slots=True)
class Opened:
    """A client, and what closes it."""

    redis: Any
    close: Callable[[], Awaitable[None]]


def open_redis(url: str, timeout_s: float) -> Opened:
    """A client of the server or of the master; nothing is connected yet.

    Raises:
        ConfigError: no such URL.
    """
    options = {
        # whoever asks sets a limit of their own: the client's goes through `asyncio.wait_for`,
        # which loses a cancellation that meets the end of a send (CPython before 3.12)
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        # callers' loops retry; a retry in here would only hide an outage from them
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    try:
        if urlsplit(url).scheme in _SCHEMES:
            return _of_sentinels(urlsplit(url), options, _SENTINEL_PART * timeout_s)
        redis = redis_asyncio.from_url(url, **options)
    except (ValueError, RedisError) as error:
        shown = without_password(url)
        # what cannot be read may quote a part of the password
        why = str(error) if shown == url else "part of it is missing, or not percent-encoded"
        raise ConfigError(f"bad Redis URL {shown}: {why}", param="redis") from None
    return Opened(redis, redis.aclose)


def without_password(url: str) -> str:
    """A Redis URL as it may be shown, also one whose password makes it none."""
    scheme, separator, rest = url.partition("://")
    address, query, _ = rest.rpartition("@")[2].partition("?")
    return f"{scheme}{separator}{address}{query and '?…'}" if separator else "(no URL)"


def _of_sentinels(url: SplitResult, options: dict[str, Any], timeout_s: float) -> Opened:
    credentials, _, hosts = url.netloc.rpartition("@")
    service, _, database = url.path.strip("/").partition("/")
    if not service:
        raise ValueError("the service that the Sentinels watch is missing (…/service)")
    user, _, password = credentials.partition(":")
    secure = {"ssl": True} if url.scheme.startswith("rediss") else {}
    times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    sentinels = Sentinel(
        [_address(part) for part in hosts.split(",")],
        sentinel_kwargs={**options, **times, **secure},
        username=unquote(user) or None,
        password=unquote(password) or None,
        db=int(database or 0),
        **options,
        **secure,
    )
    master = sentinels.master_for(service)

    async def close() -> None:
        await master.aclose()
        await sentinels.aclose()

    return Opened(master, close)


def _address(text: str) -> tuple[str, int]:
    """
    Raises:
        ValueError: no host, or no port.
    """
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host:port")
    return parts.hostname, parts.port or _SENTINEL_PORT
