"""SharedStorageConnector: objects as files in a folder that producer and consumer share.

It needs no hand-off message: a consumer finds the longest stored prefix by the hash chain, pages
first, then the tail of a producer's prompt; the last prompt token is always computed. With a commit
it serves a hand-off like any page connector. Files appear whole (written aside, then renamed); one
that is truncated or corrupt is a miss and is removed. Nothing is ever evicted: that is the user's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from diptych.connectors.base import KVLayout, RequestView
from diptych.connectors.page_orders import Outgoing
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.pages import TokenRange
from diptych.connectors.store_move import finish, not_again
from diptych.connectors.xxh3 import xxh3_64
from diptych.engine.request import KVObject
from diptych.errors import ConfigError
from diptych.hashing import HASH_BYTES, PAGE_TOKENS

logger = logging.getLogger(__name__)

NAME = "SharedStorageConnector"

_MAGIC = b"DIPTKV01"
# magic, key, number of bytes, their xxh3-64, xxh3-64 of what stands before
_HEADER = struct.Struct(f"<8s{HASH_BYTES}sQQQ")


class FileInfo(NamedTuple):
    """What a valid header says."""

    num_bytes: int
    checksum: int


class FileStore:
    """Objects as files named by their keys; safe among any number of processes."""

    def __init__(self, root: str | Path) -> None:
        """
        Raises:
            ConfigError: the folder cannot be made.
        """
        self._root = Path(root)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"shared_storage_path {root}: {error}") from error

    def path(self, key: bytes) -> Path:
        """Where an object lies or would lie."""
        name = key.hex()
        return self._root / name[:2] / f"{name}.kv"

    def look_up(self, key: bytes) -> FileInfo | None:
        """What is stored under `key`, judged by header and size alone."""
        try:
            with open(self.path(key), "rb") as file:
                return _read_header(file.read(_HEADER.size), key, os.fstat(file.fileno()).st_size)
        except OSError:
            return None

    def put_many(self, items: Sequence[Outgoing], tenant: str = "") -> list[int | None]:
        return [self._put(item) for item in items]

    def get_many(
        self,
        items: Sequence[tuple[bytes, int]],
        sink: Callable[[int, memoryview], object],
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[int | None]:
        if wait_s and not any(self.path(key).exists() for key, _ in items):
            time.sleep(wait_s)
        checksums = []
        for index, (key, num_bytes) in enumerate(items):
            buffer = memoryview(bytearray(num_bytes))
            checksums.append(self._get(key, buffer))
            if checksums[-1] is not None:
                finish(sink(index, buffer))
        return checksums

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        return

    def _put(self, item: Outgoing) -> int | None:
        key = item.key
        there = self.look_up(key)
        if there is not None and there.num_bytes == item.num_bytes:
            return there.checksum
        data = memoryview(bytearray(item.num_bytes))
        finish(item.write(data))
        checksum = xxh3_64(data)
        path = self.path(key)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(aside, "xb") as file:
                file.write(_header(key, data.nbytes, checksum))
                file.write(data)
            os.replace(aside, path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return None
        return checksum

    def _get(self, key: bytes, buffer: memoryview) -> int | None:
        path = self.path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                info = _read_header(file.read(_HEADER.size) or b"", key, size)
                if info is not None and info.num_bytes == buffer.nbytes:
                    whole = file.readinto(buffer) == buffer.nbytes
                    if whole and xxh3_64(buffer) == info.checksum:
                        return info.checksum
            logger.warning("%s is not valid and is removed", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s cannot be read: %s", path, error)
        return None


class SharedStorageScheduler(PageConnectorScheduler):
    """Finds stored prefixes without a commit, and saves every prompt, as its role says."""

    def __init__(
        self, layout: KVLayout, store: FileStore, *, is_producer: bool, is_consumer: bool
    ) -> None:
        super().__init__(layout)
        self._store = store
        self._is_producer = is_producer
        self._is_consumer = is_consumer

    def _wants_save(self, request: RequestView) -> bool:
        return self._is_producer or super()._wants_save(request)

    def _find(self, request: RequestView, num_computed_tokens: int) -> list[KVObject]:
        params = request.kv_transfer_params
        if params is not None and params.commit is not None:
            return super()._find(request, num_computed_tokens)
        return self._match(request, num_computed_tokens) if self._is_consumer else []

    def _match(self, request: RequestView, num_computed_tokens: int) -> list[KVObject]:
        """The longest stored run of pages, then the longest stored tail after it."""
        found: list[KVObject] = []
        start = num_computed_tokens - num_computed_tokens % PAGE_TOKENS
        while start + PAGE_TOKENS <= request.num_tokens:
            page = self._stored(request, TokenRange(start, start + PAGE_TOKENS))
            if page is None:
                break
            found.append(page)
            start = page.end_token
        longest = min(start + PAGE_TOKENS - 1, request.num_tokens)
        for end in range(longest, max(start, num_computed_tokens), -1):
            if tail := self._stored(request, TokenRange(start, end)):
                return [*found, tail]
        return found

    def _stored(self, request: RequestView, tokens: TokenRange) -> KVObject | None:
        key = request.prefix_hash(tokens.end)
        info = self._store.look_up(key)
        if info is None or info.num_bytes != (tokens.end - tokens.start) * self._token_bytes:
            return None
        return KVObject(
            key=key,
            start_token=tokens.start,
            end_token=tokens.end,
            checksum=info.checksum,
            num_bytes=info.num_bytes,
        )


def _header(key: bytes, num_bytes: int, checksum: int) -> bytes:
    head = _HEADER.pack(_MAGIC, key, num_bytes, checksum, 0)[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def _read_header(raw: bytes, key: bytes, file_bytes: int) -> FileInfo | None:
    """None unless the header is valid, is the key's, and the file has its size."""
    if len(raw) != _HEADER.size:
        return None
    magic, own_key, num_bytes, checksum, head_checksum = _HEADER.unpack(raw)
    valid = (
        magic == _MAGIC
        and own_key == key
        and head_checksum == xxhash.xxh3_64_intdigest(raw[:-8])
        and file_bytes == _HEADER.size + num_bytes
    )
    return FileInfo(num_bytes, checksum) if valid else None
