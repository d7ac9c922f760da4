"""The launcher's socket, over which the router's planner asks for pool sizes.

One JSON object a line: `{"pool": "prefill", "replicas": 2}` → `{"pool": …, "replicas": 2}` or
`{"error": …}`; without `replicas` it only asks.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Protocol

from diptych.errors import DiptychError

log = logging.getLogger(__name__)

_LONGEST_LINE = 4096
_MOST_WORKERS = 64


class Pools(Protocol):
    """What can be scaled."""

    def replicas(self, pool: str) -> int:
        """Workers of a pool, without those that drain."""
        ...

    async def scale(self, pool: str, replicas: int) -> int:
        """Start or drain workers; returns how many there are then."""
        ...


class ControlServer:
    """Serves `pools` on a unix socket; `start` … `close`."""

    def __init__(self, pools: Pools, path: Path) -> None:
        self._pools = pools
        self._path = path
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(
            self._serve, str(self._path), limit=_LONGEST_LINE
        )

    def close(self) -> None:
        """Take no further connections. Idempotent."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                answer = await self._answer(line)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            log.warning("a control connection broke")
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            order = json.loads(line)
            pool = str(order["pool"])
            if pool not in ("prefill", "decode"):
                raise ValueError
            replicas = int(order.get("replicas", self._pools.replicas(pool)))
            if not 0 <= replicas <= _MOST_WORKERS:
                raise ValueError
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return {"error": f"expected pool prefill or decode, replicas 0 to {_MOST_WORKERS}"}
        try:
            return {"pool": pool, "replicas": await self._pools.scale(pool, replicas)}
        except (DiptychError, OSError) as error:
            return {"error": str(error)}
