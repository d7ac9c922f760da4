"""The store's nodes as the registry knows them, kept current by a thread of its own.

The engine process has no event loop: this one runs the registry's watch. While Redis is lost the
nodes stay as they were; breakers tell which of them work.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from diptych.config import RedisConfig
from diptych.connectors.store_cluster import StoreNode
from diptych.registry import Registry, StoreRecord, Watch


class RegistryNodes:
    """Starts the thread at once; `nodes` is empty until the registry has answered.

    Raises:
        ConfigError: the URL cannot be one of a Redis.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._registry = Registry(config)
        self._nodes: dict[str, StoreNode] = {}
        self._watchers: list[Callable[[], None]] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._known_once = False
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-nodes", daemon=True)
        self._thread.start()

    def nodes(self) -> dict[str, StoreNode]:
        return self._nodes

    def watch(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on this thread when a node joined, left or was started anew."""
        self._watchers.append(on_change)

    def wait(self, timeout_s: float) -> bool:
        """Whether the registry has named a node by then."""
        return self._answered.wait(timeout_s)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._watch())

    async def _watch(self) -> None:
        try:
            async with Watch(self._registry, StoreRecord, self._on_change):
                await self._stop.wait()
        finally:
            await self._registry.close()

    def _on_change(self, records: dict[str, StoreRecord]) -> None:
        now = time.monotonic()
        nodes = {}
        for node_id, record in records.items():
            known = self._nodes.get(node_id)
            # those of the first answer were there before us
            joined_at = known.joined_at if known else (now if self._known_once else 0.0)
            nodes[node_id] = StoreNode(node_id, record.address, record.incarnation, joined_at)
        changed = nodes != self._nodes  # and not only its load
        self._nodes = nodes
        if nodes:
            self._known_once = True
            self._answered.set()
        if changed:
            for on_change in self._watchers:
                on_change()
