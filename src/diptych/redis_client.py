"""The directory's server, asked with a deadline on every call and an error that has a name.

Plain commands and Lua only, nothing newer than Redis 6.2, so that any server will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from diptych.config import RedisConfig
from diptych.errors import ConfigError, UnavailableError
from diptych.redis_url import open_redis, without_password


class RedisClient:
    """A connection pool, and whether the server answered last time."""

    def __init__(self, config: RedisConfig, *, timeout_s: float = 2.0) -> None:
        if not config.redis:
            raise ConfigError("no Redis is configured: name one with --redis redis://HOST:PORT")
        self._where = without_password(config.redis)
        self._timeout_s = timeout_s
        # braces: all keys fall into one slot of a cluster, which scripts need
        self.prefix = "{" + config.registry_prefix + "}"
        self._opened = open_redis(config.redis, timeout_s)
        self._redis = self._opened.redis
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
        await self._opened.close()
