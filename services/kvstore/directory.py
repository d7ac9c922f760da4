"""Who holds what, in Redis: one hash per node, object key → tier and size.

The hash lives as long as its node's heartbeats, so that a lost node's entries go with it. A marker
field carries the node's incarnation: where it is missing, the server lost what it held (or the node
was silent for too long), and the node announces its whole inventory again. It does so too where the
server has another run id: what a restarted one remembers may be old. The node never waits for the
directory; while Redis is lost it serves from its own table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from diptych.clock import Clock, SystemClock
from diptych.errors import UnavailableError
from diptych.redis_client import RedisClient
from diptych.services.kvstore.tiers import Held, TierChanges
from diptych.tasks import end_task

_log = logging.getLogger(__name__)

# Lua passes arguments over a stack of some thousands of entries.
_BATCH = 1000

_ENTRY = re.compile(rb"([a-z]{1,16}):([0-9]{1,19})")

_BEGIN = """
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], '', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
# ARGV: incarnation, life in ms, number of keys to remove, those keys, then key and value in turn.
_APPLY = """
if redis.call('HGET', KEYS[1], '') ~= ARGV[1] then return 0 end
local last_removed = 3 + ARGV[3]
if last_removed > 3 then redis.call('HDEL', KEYS[1], unpack(ARGV, 4, last_removed)) end
if #ARGV > last_removed then redis.call('HSET', KEYS[1], unpack(ARGV, last_removed + 1)) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_END = "if redis.call('HGET', KEYS[1], '') == ARGV[1] then redis.call('DEL', KEYS[1]) end"
_LOOKUP = """
local found = {}
for i, node in ipairs(KEYS) do found[i] = redis.call('HMGET', node, unpack(ARGV)) end
return found
"""


class Holder(NamedTuple):
    """A node that has an object."""

    node_id: str
    tier: str
    num_bytes: int


class Inventory(Protocol):
    """What the directory needs of the object table."""

    def take_changes(self) -> TierChanges: ...
    def inventory(self) -> dict[bytes, Held]: ...


class Directory:
    """Calls on the directory, each with a deadline.

    Raises (every method): UnavailableError: Redis does not answer.
    """

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._begin = redis.script(_BEGIN)
        self._apply = redis.script(_APPLY)
        self._end = redis.script(_END)
        self._lookup = redis.script(_LOOKUP)

    async def begin(self, node_id: str, incarnation: str, life_s: float) -> None:
        """Start the node's entries afresh."""
        await self._redis.run(self._begin, [self._key(node_id)], [incarnation, _ms(life_s)])

    async def apply(
        self, node_id: str, incarnation: str, life_s: float, changes: TierChanges
    ) -> bool:
        """Enter changes and renew the entries' life; False where the entries were lost."""
        head: list[str | bytes | int] = [incarnation, _ms(life_s)]
        for removed in _batches(sorted(changes.gone)) or [[]]:
            if not await self._run_apply(node_id, [*head, len(removed), *removed]):
                return False
        for keys in _batches(sorted(changes.held)):
            pairs = [p for k in keys for p in (k, _value(changes.held[k]))]
            if not await self._run_apply(node_id, [*head, 0, *pairs]):
                return False
        return True

    async def run_id(self) -> str:
        """Changes with every start of the server."""
        return await self._redis.run_id()

    async def end(self, node_id: str, incarnation: str) -> None:
        """Remove the node's entries."""
        await self._redis.run(self._end, [self._key(node_id)], [incarnation])

    async def lookup(self, node_ids: Sequence[str], keys: Sequence[bytes]) -> list[list[Holder]]:
        """Holders of each key among the given nodes; entries that no node made are left out."""
        holders: list[list[Holder]] = []
        for batch in _batches(keys):
            nodes = [self._key(node_id) for node_id in node_ids]
            found = await self._redis.run(self._lookup, nodes, list(batch))
            for position in range(len(batch)):
                values = [(node_ids[n], values[position]) for n, values in enumerate(found)]
                known = [_holder(node, value) for node, value in values if value]
                holders.append([holder for holder in known if holder is not None])
        return holders

    async def _run_apply(self, node_id: str, args: list[str | bytes | int]) -> bool:
        return bool(await self._redis.run(self._apply, [self._key(node_id)], args))

    def _key(self, node_id: str) -> str:
        return self._redis.key("directory", node_id)


class DirectoryWriter:
    """`async with`: keeps a node's entries current until the block ends, then removes them."""

    def __init__(
        self,
        directory: Directory,
        inventory: Inventory,
        node_id: str,
        incarnation: str,
        *,
        interval_s: float,
        life_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._directory = directory
        self._inventory = inventory
        self._node = (node_id, incarnation)
        self._interval_s = interval_s
        self._life_s = life_s
        self._clock = clock or SystemClock()
        self._announced = False
        self._run_id = ""
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="directory")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await end_task(self._task)
        with contextlib.suppress(UnavailableError):
            await self._directory.end(*self._node)

    async def _run(self) -> None:
        # the Redis client may swallow a cancellation that comes together with an answer
        while not self._closing:
            try:
                await self._flush()
            except UnavailableError:
                self._begin_anew()
            except Exception:
                _log.exception("directory loop")
                self._begin_anew()
            await self._clock.sleep(self._interval_s)

    def _begin_anew(self) -> None:
        """What was not entered, and what changes until Redis is back, is covered by the next whole
        inventory: kept, it would pile up."""
        self._announced = False
        self._inventory.take_changes()

    async def _flush(self) -> None:
        run_id = await self._directory.run_id()
        changes = self._inventory.take_changes()
        if not self._announced or run_id != self._run_id:
            self._run_id = run_id
            await self._directory.begin(*self._node, self._life_s)
            # taken after `begin`, with no await between: later changes are all in the next flush
            self._inventory.take_changes()
            changes = TierChanges(self._inventory.inventory(), set())
            _log.info("announcing %d objects to the directory", len(changes.held))
        self._announced = await self._directory.apply(*self._node, self._life_s, changes)


def _batches(items: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _value(held: Held) -> str:
    return f"{held.tier}:{held.num_bytes}"


def _holder(node_id: str, value: bytes) -> Holder | None:
    """What `_value` made; anybody may have written something else there."""
    entry = _ENTRY.fullmatch(value)
    return None if entry is None else Holder(node_id, entry[1].decode(), int(entry[2]))
