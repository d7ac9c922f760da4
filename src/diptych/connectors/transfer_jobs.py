"""What a transfer thread is given: loads and saves, and what is known of a prompt that is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from diptych.connectors.page_orders import LoadOrder, SaveOrder
from diptych.connectors.pages import PageObject
from diptych.engine.request import KVCommit, KVObject
from diptych.errors import ConfigError

if TYPE_CHECKING:
    from torch.cuda import Event

    from diptych.connectors.page_copy import Bytes

# What one call to the store moves. A save's, and that of a load which follows one, is a long
# prompt: it goes on without a pause. No more, so that room which is staged is given back.
BATCH_OBJECTS = 256
SAVE_BYTES = 1 << 30
LOAD_BYTES = 256 << 20

# a load that has not come forward for so long is stuck: nobody waits for its end
_ARRIVING_S = 0.02

Tokens = TypeVar("Tokens", KVObject, PageObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of one engine's transfers.

    `max_staged_bytes` bounds what waits to be stored, in the cache's own memory: beyond it only a
    save that finds nothing waiting is staged whole. None takes 512 MiB, 4 GiB on a GPU. For
    `trust_stored_s` an object that was stored or loaded is not sent again.
    """

    transfer_timeout_s: float = 10.0
    retry_s: float = 1.0
    max_queued_transfers: int = 1024
    max_staged_bytes: int | None = None
    trust_stored_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("transfer_timeout_s", "retry_s", "max_queued_transfers", "max_staged_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}")


@dataclass(slots=True)
class Load:
    """A load under way: `valid` tokens from position 0 hold so far. One that follows has objects
    that are `awaited`, came forward last at `moved_s`, and says `again` if it wants another turn.
    `num_taken` objects have begun to come, the last at `read_s`; `num_open` of them are not all
    copied. Times are for `PageTimes`, too."""

    order: LoadOrder
    deadline_s: float
    valid: int
    aborted: bool = False
    awaited: list[KVObject] = field(default_factory=list)
    moved_s: float = 0.0
    again: bool = False
    num_taken: int = 0
    num_open: int = 0
    ordered_s: float = 0.0
    begun_s: float = 0.0
    read_s: float = 0.0

    @property
    def is_all_taken(self) -> bool:
        """Whether all of it is on the way, or there."""
        return not self.aborted and self.num_taken >= len(self.order.objects)

    def is_arriving(self, now: float) -> bool:
        """Whether its last quarter is on the way, so that all is there within a step or so."""
        num_objects = len(self.order.objects)
        is_last = 4 * self.num_taken >= 3 * num_objects
        return is_last and not self.aborted and now - self.read_s < _ARRIVING_S


@dataclass(slots=True)
class Sending:
    """What is stored of one request's prompt, in token order; None stands for what is not."""

    objects: list[KVObject | None] = field(default_factory=list)
    closed: bool = False
    aborted: bool = False

    def commit(self, order: SaveOrder, connector: str) -> KVCommit:
        """What is stored without a gap from position 0; it may be nothing."""
        objects = list(_until_none(self.objects))
        return KVCommit(
            epoch=order.epoch,
            kv_namespace=order.kv_namespace,
            num_tokens=objects[-1].end_token if objects else 0,
            objects=objects,
            connector=connector,
            num_cached_tokens=order.num_cached_tokens,
        )


@dataclass(slots=True)
class Save:
    """One order on its way: staged copies by key, `num_bytes` of them still staged, and what is
    stored, of which some was known before. Times are for `PageTimes`."""

    order: SaveOrder
    pages: dict[bytes, Bytes]
    mark: Event | None
    deadline_s: float
    sending: Sending
    num_bytes: int
    stored: dict[bytes, KVObject] = field(default_factory=dict)
    computed_s: float = 0.0
    begun_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def objects(self) -> list[KVObject | None]:
        """What is stored of the order's objects, in their order."""
        return [self.stored.get(item.key) for item in self.order.objects]


def batches(objects: Sequence[Tokens], token_bytes: int, max_bytes: int) -> Iterator[list[Tokens]]:
    """Cut by number and by bytes; every batch has at least one object."""
    batch: list[Tokens] = []
    num_bytes = 0
    for item in objects:
        size = (item.end_token - item.start_token) * token_bytes
        if batch and (len(batch) == BATCH_OBJECTS or num_bytes + size > max_bytes):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch


def stored_object(item: PageObject, num_bytes: int, checksum: int) -> KVObject:
    """The object as the store has it."""
    return KVObject(
        key=item.key,
        start_token=item.start_token,
        end_token=item.end_token,
        checksum=checksum,
        num_bytes=num_bytes,
    )


def _until_none(objects: Sequence[KVObject | None]) -> Iterator[KVObject]:
    for item in objects:
        if item is None:
            return
        yield item
