"""Who is there: processes announce themselves in Redis and are gone when they fall silent.

A record lives for `liveness_s` of the *server's* time after its last heartbeat. When Redis is lost
membership freezes: watchers keep what they knew, members keep trying, traffic goes on. When it
comes back, perhaps empty, watchers give every member `liveness_s` to announce itself again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import msgspec
import xxhash

from diptych.clock import Clock, SystemClock
from diptych.config import RedisConfig
from diptych.errors import UnavailableError
from diptych.redis_client import RedisClient
from diptych.rpc import PROTOCOL_VERSION
from diptych.tasks import end_task

_log = logging.getLogger(__name__)

_ANNOUNCE = """
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
redis.call('ZADD', KEYS[1], string.format('%.0f', until_ms), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
"""
# A restarted process may have taken the name over: withdraw only one's own incarnation.
_WITHDRAW = """
local record = redis.call('HGET', KEYS[2], ARGV[1])
if record and cjson.decode(record).incarnation == ARGV[2] then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
"""
# KEYS[3] marks this life of the data: it is gone when the server lost what it held.
_LIST = """
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)) do
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
redis.call('SET', KEYS[3], ARGV[1], 'NX')
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('HGET', KEYS[2], id)
  if record then found[#found + 1] = {id, record} end
end
return {redis.call('GET', KEYS[3]), found}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLoad:
    """How busy a worker is; fields as `WorkerLoad` of the worker contract."""

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    kv_usage: float = 0.0
    num_kv_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A prefill, decode or aggregated worker."""

    KIND: ClassVar[str] = "worker"

    worker_id: str
    incarnation: str
    role: str  # prefill, decode or aggregated
    address: str  # host:port of its gRPC server
    admin_address: str
    model: str
    kv_namespace: str
    protocol_version: int = PROTOCOL_VERSION
    max_model_len: int = 0
    draining: bool = False
    load: MemberLoad = MemberLoad()

    @property
    def member_id(self) -> str:
        return self.worker_id


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """A node of the KV store."""

    KIND: ClassVar[str] = "kvstore"

    node_id: str
    incarnation: str
    address: str
    admin_address: str
    boot_id: str
    pool_bytes: int
    used_bytes: int = 0
    protocol_version: int = PROTOCOL_VERSION

    @property
    def member_id(self) -> str:
        return self.node_id


class Record(Protocol):
    """What the registry must know of a record."""

    KIND: ClassVar[str]

    @property
    def member_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Members(Generic[R]):
    """One answer of the registry; `epoch` changes when the server lost what it held."""

    epoch: str
    records: dict[str, R]


class Registry:
    """The registry's calls, each with a deadline. `Heartbeat` and `Watch` are its loops, of which
    the first that loses Redis says so for all (`complained`)."""

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.redis = RedisClient(config)
        self.complained = False
        self._announce = self.redis.script(_ANNOUNCE)
        self._withdraw = self.redis.script(_WITHDRAW)
        self._list = self.redis.script(_LIST)
        # by kind: digests of what the last answer had that cannot be read, and was told
        self._unreadable: dict[str, set[bytes]] = {}

    async def announce(self, record: Record) -> None:
        """Set the record; it lives for `liveness_s` from now.

        Raises:
            UnavailableError: Redis does not answer.
        """
        await self.redis.run(
            self._announce,
            self._keys(record.KIND),
            [record.member_id, msgspec.json.encode(record), int(self.config.liveness_s * 1000)],
        )

    async def withdraw(self, record: Record) -> None:
        """Remove the record, unless another incarnation has taken its name.

        Raises:
            UnavailableError: Redis does not answer.
        """
        await self.redis.run(
            self._withdraw, self._keys(record.KIND), [record.member_id, record.incarnation]
        )

    async def members(self, kind: type[R]) -> Members[R]:
        """The live records of one kind. Those that cannot be read are left out; the log tells of
        each once, for as long as it stays.

        Raises:
            UnavailableError: Redis does not answer.
        """
        keys = [*self._keys(kind.KIND), self.redis.key("epoch")]
        epoch, found = await self.redis.run(self._list, keys, [self.clock.new_id()])
        records: dict[str, R] = {}
        unreadable: dict[bytes, str] = {}
        for member_id, value in found:
            try:
                record = msgspec.json.decode(value, type=kind)
                if record.member_id.encode() != member_id:
                    raise ValueError("it is not under its own name")
            except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
                digest = xxhash.xxh3_128_digest(member_id + b"\0" + value)
                unreadable[digest] = f"{member_id[:64]!r}: {str(error)[:200]}"
                continue
            records[record.member_id] = record
        self._tell(kind.KIND, unreadable)
        # anybody may have written there what is no text: it is another epoch, and that is all
        return Members(epoch.decode(errors="backslashreplace"), records)

    async def close(self) -> None:
        await self.redis.close()

    def _tell(self, kind: str, unreadable: dict[bytes, str]) -> None:
        """One line for all that the last answer did not have yet."""
        news = [why for d, why in unreadable.items() if d not in self._unreadable.get(kind, ())]
        if news:
            more = f" (and {len(news) - 1} more)" if len(news) > 1 else ""
            _log.warning("unreadable %s record in the registry: %s%s", kind, news[0], more)
        self._unreadable[kind] = set(unreadable)

    def _keys(self, kind: str) -> list[str]:
        return [self.redis.key("members", kind), self.redis.key("records", kind)]


class _Loop:
    """A task that repeats `_step` every heartbeat until it is closed.

    `ready` turns true with the first success and stays so; until then `problem` says why not.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self._closing = False
        self.ready = False

    @property
    def problem(self) -> str:
        return "" if self.ready else self._registry.redis.problem

    async def _step(self) -> None:
        raise NotImplementedError

    def _lost(self) -> None:
        """The first failure after a success."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=type(self).__name__)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await end_task(self._task)

    async def _run(self) -> None:
        # the Redis client may swallow a cancellation that comes together with an answer
        while not self._closing:
            try:
                await self._step()
            except UnavailableError as error:
                if not self._failing:
                    self._complain(error)
                    self._lost()
                self._failing = True
            except Exception:
                # a loop that dies silently would drop the process from the cluster
                _log.exception("registry loop")
            else:
                if self._failing and self._registry.complained:
                    _log.info("Redis answers again")
                    self._registry.complained = False
                self._failing = False
                self.ready = True
            if not self._closing:
                await self._registry.clock.sleep(self._registry.config.heartbeat_s)

    def _complain(self, error: UnavailableError) -> None:
        if not self._registry.complained:
            self._registry.complained = True
            _log.warning("%s%s", error, "; membership is frozen" if self.ready else "")


class Heartbeat(_Loop):
    """`async with Heartbeat(registry, record):` announces `record()` until the block ends."""

    def __init__(self, registry: Registry, record: Callable[[], Record]) -> None:
        super().__init__(registry)
        self._record = record

    async def _step(self) -> None:
        await self._registry.announce(self._record())

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        with contextlib.suppress(UnavailableError):
            await self._registry.withdraw(self._record())


class Watch(_Loop, Generic[R]):
    """`async with Watch(registry, WorkerRecord, on_change):` keeps `members` current.

    `on_change(members)` is called on the loop after each poll that changed anything, loads
    included. Members are kept while Redis is silent, and for `liveness_s` after it lost its data.
    """

    def __init__(
        self,
        registry: Registry,
        kind: type[R],
        on_change: Callable[[dict[str, R]], None] | None = None,
    ) -> None:
        super().__init__(registry)
        self._kind = kind
        self._on_change = on_change
        self._epoch = ""
        self._keep_until = 0.0
        self.members: dict[str, R] = {}

    async def _step(self) -> None:
        found = await self._registry.members(self._kind)
        now = self._registry.clock.monotonic()
        if self._failing or (self._epoch and found.epoch != self._epoch):
            self._keep_until = now + self._registry.config.liveness_s
        self._epoch = found.epoch
        kept = self.members if now < self._keep_until else {}
        members = {**kept, **found.records}
        if members != self.members:
            self.members = members
            if self._on_change is not None:
                self._on_change(dict(members))
