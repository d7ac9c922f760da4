"""Which workers there are: a fixed list, or what the registry says. One link for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from diptych.registry import Registry, Watch, WorkerRecord
from diptych.services.router.routable import Role
from diptych.services.router.worker_link import WorkerLink
from diptych.tasks import end_task

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
# A link has a channel and two tasks, whether somebody is there or not.
_MAX_LINKS = 1024


class Members:
    """The links to all known workers; `close` ends them."""

    def __init__(
        self,
        make_link: Callable[[str, Callable[[], None]], WorkerLink],
        serves: Callable[[str], bool] = lambda model: True,
    ) -> None:
        """`make_link(address, on_change)` makes a link that is not open yet; workers of models that
        `serves(model)` denies get no requests."""
        self._serves = serves
        self._make_link = make_link
        self._links: dict[str, WorkerLink] = {}
        self._wanted: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._said_lengths: dict[str, int] = {}
        self._full = False

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    @property
    def ready(self) -> list[WorkerLink]:
        """Workers that take requests now."""
        return [k for k in self._links.values() if k.ready and self._serves(k.info.model)]

    @property
    def tests_links(self) -> bool:
        """Whether a decode worker is still testing whom it can read; bounded in time."""
        return any(link.tests_links for link in self.ready if link.role is Role.DECODE)

    @property
    def has_untested_links(self) -> bool:
        """As `tests_links`, however long ago the tests began."""
        return any(link.has_untested_links for link in self.ready if link.role is Role.DECODE)

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output that some way through the ready workers can take, the split
        one and that of an aggregated worker; None if there is none."""
        longest: dict[Role, int] = {}
        for link in self.ready:
            longest[link.role] = max(link.info.max_model_len, longest.get(link.role, 0))
        ways = [longest[Role.AGGREGATED]] if Role.AGGREGATED in longest else []
        if Role.PREFILL in longest and Role.DECODE in longest:
            ways.append(min(longest[Role.PREFILL], longest[Role.DECODE]))
        return max(ways or longest.values(), default=None)

    def with_room(self, num_tokens: int) -> list[WorkerLink]:
        """Ready workers that can take so many tokens of prompt and output."""
        return [link for link in self.ready if link.info.max_model_len >= num_tokens]

    def count(self) -> Counter[Role]:
        """Ready workers by role."""
        return Counter(link.role for link in self.ready)

    async def set_addresses(self, addresses: Iterable[str]) -> None:
        """Open links to new addresses; those that are not named any more close once their worker
        is gone, so that what runs there ends in peace."""
        self._wanted = set(addresses)
        self._sweep()
        for address in self._new_addresses():
            link = self._make_link(address, self._on_change)
            self._links[address] = await link.__aenter__()
            logger.info("worker at %s joined", address)

    def _new_addresses(self) -> list[str]:
        """As many of those without a link as there is room for."""
        new = sorted(self._wanted - self._links.keys())
        room = max(0, _MAX_LINKS - len(self._links))
        if len(new) > room and not self._full:
            logger.warning(
                "%d workers are announced; the first %d get requests", len(self._wanted), _MAX_LINKS
            )
        self._full = len(new) > room
        return new[:room]

    async def wait_change(self, timeout_s: float) -> None:
        """Return when a worker has become usable or stopped being so, or after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def close(self) -> None:
        """Close every link; what runs there is lost."""
        self._wanted = set()
        self._sweep(connected_too=True)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _on_change(self) -> None:
        self._sweep()
        self._introduce()
        self._compare_lengths()
        self._changed.set()
        self._changed = asyncio.Event()

    def _introduce(self) -> None:
        """Tell decode workers whom they may be asked to read from."""
        ready = [link for link in self.ready if link.direct]
        for decode in ready:
            if decode.role is Role.DECODE:
                decode.meet(
                    [
                        link.peer
                        for link in ready
                        if link.role is Role.PREFILL and link.kv_namespace == decode.kv_namespace
                    ]
                )

    def _compare_lengths(self) -> None:
        """Say once of workers that do not agree: they are not of one deployment."""
        lengths = {link.address: link.info.max_model_len for link in self.ready}
        if len(set(lengths.values())) > 1 and not lengths.items() <= self._said_lengths.items():
            self._said_lengths = lengths
            each = ", ".join(f"{address} {length}" for address, length in sorted(lengths.items()))
            logger.warning("workers differ in max_model_len, long requests pass some by: %s", each)

    def _sweep(self, *, connected_too: bool = False) -> None:
        for address in self._links.keys() - self._wanted:
            if connected_too or not self._links[address].connected:
                link = self._links.pop(address)
                logger.info("worker at %s left", address)
                task = asyncio.create_task(self._close(link))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close(link: WorkerLink) -> None:
        await link.__aexit__(None, None, None)


@asynccontextmanager
async def static_membership(members: Members, addresses: Iterable[str]) -> AsyncIterator[None]:
    """Serve with a fixed list of `host:port`."""
    await members.set_addresses(addresses)
    try:
        yield
    finally:
        await members.close()


@asynccontextmanager
async def registry_membership(
    members: Members, registry: Registry
) -> AsyncIterator[Watch[WorkerRecord]]:
    """Serve with what the registry knows, as it changes.

    While the registry is silent, membership stays as it was.
    """
    wanted: asyncio.Queue[list[str]] = asyncio.Queue(maxsize=1)

    def on_change(records: dict[str, WorkerRecord]) -> None:
        addresses = [record.address for record in records.values()]
        if wanted.full():
            wanted.get_nowait()
        wanted.put_nowait(addresses)

    async def follow() -> None:
        while True:
            addresses = await wanted.get()
            try:
                await members.set_addresses(addresses)
            except Exception:
                # a loop that dies silently would freeze the membership
                logger.exception("the workers of the registry cannot be followed")
                await asyncio.sleep(_RETRY_S)
                if wanted.empty():
                    wanted.put_nowait(addresses)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(members.close)
        watch = Watch(registry, WorkerRecord, on_change)
        task = asyncio.create_task(follow(), name="membership")
        stack.push_async_callback(end_task, task)
        yield await stack.enter_async_context(watch)
