"""Several nodes as one store: every key has its own order of nodes; the first that works has it.

Thread-safe. A node that is lost loses only its share: its keys are put on the next node of their
order, and looked for there, until it works again. A node that joined lately is new to keys that the
next one in their order still has, so those are asked for there too. Reads of a hot object are
spread over the nodes that its owner has copied it to.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_move import not_again
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult
from diptych.connectors.store_ring import ranked
from diptych.connectors.store_session import Sink
from diptych.errors import TransferError

_MAX_CALLS_AT_ONCE = 8
_MAX_HOT_KEYS = 4096
_HOT_S = 30.0
# A node counts as new for so long: by then what was asked for has moved, or is not needed.
_NEW_S = 600.0
# Nodes of a key's order that are tried.
_MAX_TRIES = 2

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StoreNode:
    """A node as its clients see it. `joined_at`: monotonic; 0 for one that was always there."""

    node_id: str
    address: str
    incarnation: str = ""
    joined_at: float = 0.0


class StoreNodes(Protocol):
    """Who the nodes are now."""

    def nodes(self) -> dict[str, StoreNode]:
        """By id; empty where none is known. Never blocks."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this after every change, on any thread."""
        ...

    def close(self) -> None: ...


class FixedNodes:
    """Nodes for good: named, or by address alone."""

    def __init__(self, nodes: Iterable[str | StoreNode]) -> None:
        known = [StoreNode(n, n) if isinstance(n, str) else n for n in nodes]
        self._nodes = {node.node_id: node for node in known}

    def nodes(self) -> dict[str, StoreNode]:
        return self._nodes

    def watch(self, on_change: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return


class StoreCluster:
    """Puts and gets in batches over all nodes; results and errors as `StoreClient`'s, except that
    nothing raises for a lost store.

    Args:
        timeout_s: deadline of a call that brings none.
    """

    def __init__(
        self,
        nodes: StoreNodes,
        *,
        timeout_s: float = 5.0,
        call_timeout_s: float = 2.0,
        transport: str = "auto",
    ) -> None:
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._call_timeout_s = call_timeout_s
        self._transport = transport
        self._lock = threading.Lock()
        self._clients: dict[str, tuple[StoreNode, StoreClient]] = {}
        self._hot: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_MAX_CALLS_AT_ONCE, thread_name_prefix="kv-store")
        nodes.watch(self._let_go)

    def put_many(
        self, items: Sequence[PutItem], timeout_s: float | None = None, tenant: str = ""
    ) -> list[PutResult]:
        """Store objects, prefix first. Writers may be called from several threads at once."""

        def put(client: StoreClient, at: list[int], left_s: float) -> list[PutResult]:
            return client.put_many([items[i] for i in at], left_s, tenant)

        lost = PutResult(Outcome.UNAVAILABLE)
        orders = [self._order(item.key) for item in items]
        return self._rounds(
            orders, put, lost, lambda r, _: r.outcome is Outcome.UNAVAILABLE, timeout_s
        )

    def get_many(
        self,
        keys: Sequence[bytes],
        sink: Sink,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[GetResult]:
        """Read objects. Sinks may be called from several threads at once, and again for an object
        that is read from another node."""

        def get(client: StoreClient, at: list[int], left_s: float) -> list[GetResult]:
            wanted = [keys[i] for i in at]
            return client.get_many(wanted, lambda i, v: sink(at[i], v), left_s, wait_s, goes_on)

        def again(result: GetResult, at: int) -> bool:
            if result.outcome is Outcome.OK:
                return False
            return result.outcome is not Outcome.NOT_FOUND or elsewhere[at]

        orders, elsewhere = self._read_orders(keys)
        results = self._rounds(orders, get, GetResult(Outcome.UNAVAILABLE), again, timeout_s)
        self._note_hot(keys, results)
        return results

    def exists_many(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Which objects are there, as far as the nodes that answer know."""

        def exists(client: StoreClient, at: list[int], left_s: float) -> list[bool]:
            try:
                return client.exists_many([keys[i] for i in at], left_s)
            except TransferError:
                return [False] * len(at)

        orders, elsewhere = self._read_orders(keys)
        return self._rounds(
            orders, exists, False, lambda there, at: not there and elsewhere[at], timeout_s
        )

    def clients(self) -> dict[str, StoreClient]:
        """A client of every node that is known now, by node id."""
        return {node_id: self._client(node) for node_id, node in self._nodes.nodes().items()}

    def pools(self) -> list[memoryview]:
        """The nodes' pools that are mapped here, whole and writable."""
        with self._lock:
            clients = [client for _, client in self._clients.values()]
        return [view for client in clients for view in client.pools()]

    def close(self) -> None:
        """Drop all connections. Idempotent."""
        self._nodes.close()
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for _, client in clients:
            client.close()
        self._threads.shutdown(wait=False)

    # --- who has what

    def _order(self, key: bytes) -> list[str]:
        """The nodes to try for a key: those that work, best first."""
        nodes = self._nodes.nodes()
        if len(nodes) < 2:
            return list(nodes)
        usable = [n for n, node in nodes.items() if self._client(node).usable]
        return ranked(key, usable or nodes)[:_MAX_TRIES]

    def _read_orders(self, keys: Sequence[bytes]) -> tuple[list[list[str]], list[bool]]:
        """The nodes to try for each key, and whether what the first lacks may be on the next."""
        nodes = self._nodes.nodes()
        if len(nodes) < 2:
            return [list(nodes)] * len(keys), [False] * len(keys)
        new_since = time.monotonic() - _NEW_S
        usable = [n for n, node in nodes.items() if self._client(node).usable] or list(nodes)
        orders, elsewhere = [], []
        for key in keys:
            order = ranked(key, usable)
            copies = self._num_copies(key)
            first = random.randrange(min(copies, len(order))) if copies > 1 else 0
            tries = [order[first], *(n for n in order if n != order[first])][:_MAX_TRIES]
            orders.append(tries)
            elsewhere.append(first > 0 or nodes[order[0]].joined_at > new_since)
        return orders, elsewhere

    def _num_copies(self, key: bytes) -> int:
        with self._lock:
            copies, until = self._hot.get(key, (1, 0.0))
        return copies if time.monotonic() < until else 1

    def _note_hot(self, keys: Sequence[bytes], results: Sequence[GetResult]) -> None:
        hot = [(k, r.num_copies) for k, r in zip(keys, results, strict=True) if r.num_copies > 1]
        if not hot:
            return
        until = time.monotonic() + _HOT_S
        with self._lock:
            for key, copies in hot:
                self._hot[key] = (copies, until)
                self._hot.move_to_end(key)
            while len(self._hot) > _MAX_HOT_KEYS:
                self._hot.popitem(last=False)

    def _client(self, node: StoreNode) -> StoreClient:
        with self._lock:
            known = self._clients.get(node.node_id)
            if known is not None and known[0].address == node.address:
                if known[0].incarnation != node.incarnation:
                    known[1].reset()
                    self._clients[node.node_id] = (node, known[1])
                return known[1]
            client = StoreClient(
                node.address,
                timeout_s=self._timeout_s,
                call_timeout_s=self._call_timeout_s,
                transport=self._transport,
            )
            self._clients[node.node_id] = (node, client)
        if known is not None:
            known[1].close()
        return client

    def _forget_gone(self) -> None:
        """Drop the connections to nodes that are no members any more."""
        nodes = self._nodes.nodes()
        with self._lock:
            gone = [self._clients.pop(n)[1] for n in list(self._clients) if n not in nodes]
        for client in gone:
            client.close()

    def _let_go(self) -> None:
        """Drop what leads to nodes, or incarnations, that are gone: a dead node's pool is freed
        once nobody maps it, and its successor may need the room."""
        self._forget_gone()
        with self._lock:
            known = list(self._clients)
        nodes = self._nodes.nodes()
        for node_id in known:
            if node_id in nodes:
                self._client(nodes[node_id])

    # --- rounds of calls

    def _rounds(
        self,
        orders: Sequence[list[str]],
        work: Callable[[StoreClient, list[int], float], list[R]],
        lost: R,
        try_next: Callable[[R, int], bool],
        timeout_s: float | None,
    ) -> list[R]:
        """Ask the first node of each item's order, then the next where `try_next` says so."""
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._forget_gone()
        results = [lost] * len(orders)
        left = list(range(len(orders)))
        for turn in range(_MAX_TRIES):
            groups: dict[str, list[int]] = {}
            for at in left:
                if turn < len(orders[at]):
                    groups.setdefault(orders[at][turn], []).append(at)
            if not groups or time.monotonic() >= until:
                break
            for at, result in self._ask_all(groups, work, until):
                results[at] = result
            left = [at for group in groups.values() for at in group if try_next(results[at], at)]
        return results

    def _ask_all(
        self,
        groups: dict[str, list[int]],
        work: Callable[[StoreClient, list[int], float], list[R]],
        until: float,
    ) -> list[tuple[int, R]]:
        """Every group on its node, all at once."""
        nodes = self._nodes.nodes()
        calls = [(self._client(nodes[n]), at) for n, at in groups.items() if n in nodes]
        left_s = until - time.monotonic()
        if len(calls) == 1:
            answers = [work(calls[0][0], calls[0][1], left_s)]
        else:
            answers = list(self._threads.map(lambda call: work(call[0], call[1], left_s), calls))
        return [
            pair
            for (_, at), answer in zip(calls, answers, strict=True)
            for pair in zip(at, answer, strict=True)
        ]
