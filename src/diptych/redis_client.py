"""One Redis, asked with a deadline on every call and an error that has a name.

Plain commands and Lua only, nothing newer than Redis 6.2, so that any server will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from redis import asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from diptych.config import RedisConfig
from diptych.errors import ConfigError, UnavailableError


class RedisClient:
    """A connection pool, and whether the server answered last time."""

    def __init__(self, config: RedisConfig, *, timeout_s: float = 2.0) -> None:
        if not config.redis:
            raise ConfigError("no Redis is configured: name one with --redis redis://HOST:PORT")
        self._where = without_password(config.redis)
        self._timeout_s = timeout_s
        # braces: all keys fall into one slot of a cluster, which scripts need
        self.prefix = "{" + config.registry_prefix + "}"
        try:
            self._redis = redis_asyncio.from_url(
                config.redis,
                # ours is around each call: the client's own goes through `asyncio.wait_for`, which
                # loses a cancellation that meets the end of a send (CPython before 3.12)
                socket_timeout=None,
                socket_connect_timeout=timeout_s,
                # callers' loops retry; a retry in here would only hide an outage from them
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, RedisError) as error:
            raise ConfigError(f"bad Redis URL {self._where}: {error}", param="redis") from error
        self.available = False
        self.problem = f"Redis at {self._where} has not answered yet"

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def script(self, text: str) -> Any:
        """A Lua script for `run`."""
        return self._redis.register_script(text)

    async def run(self, script: Any, keys: list[str], args: list[str | bytes | int]) -> Any:
        """Run a script of `script`.

        Raises:
            UnavailableError: no answer in time, or an error in its place.
        """
        return await self._ask(lambda: script(keys=keys, args=args))

    async def run_id(self) -> str:
        """The server's run id, new at its every start; empty where the server tells none.

        Raises:
            UnavailableError: no answer in time.
        """
        info = await self._ask(lambda: self._redis.info("server"))
        return str(info.get("run_id", ""))

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await command()
        except (RedisError, OSError, TimeoutError) as error:
            self.available = False
            reason = str(error) or type(error).__name__
            self.problem = f"Redis at {self._where} does not answer: {reason}"
            raise UnavailableError(self.problem) from error
        if task and task.cancelling() > cancels:
            raise asyncio.CancelledError  # lost in there; whoever waits for our end would hang
        self.available = True
        self.problem = ""
        return answer

    async def close(self) -> None:
        await self._redis.aclose()


def without_password(url: str) -> str:
    """A Redis URL as it may be shown."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]).geturl()
