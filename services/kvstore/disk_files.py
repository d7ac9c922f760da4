"""Objects as files of one folder. Blocking I/O, for threads; nothing here knows who uses what.

A file is a header block and the object's bytes, rounded up to whole blocks: both can be moved with
direct I/O straight between the disk and the pool, whose objects lie on block boundaries. A file
appears whole (written aside, then renamed). Nothing is synced: what a crash of the host tears has
a wrong checksum, and a wrong checksum is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from diptych.connectors.xxh3 import xxh3_64
from diptych.errors import ConfigError
from diptych.services.kvstore.object_types import KEY_BYTES

_log = logging.getLogger(__name__)

BLOCK_BYTES = 4096
# Measured on a virtual SSD: direct reads are 1.5 times as fast as buffered ones from 1 MiB on and
# equal at 128 KiB, where direct writes are far slower.
DIRECT_BYTES = 1 << 20
_MAGIC = b"DKVF0001"
_TENANT_BYTES = 128
# magic, key, tenant, bytes, their xxh3-64, xxh3-64 of what stands before
_HEADER = struct.Struct(f"<8s{KEY_BYTES}s{_TENANT_BYTES}sQQQ")


class FileInfo(NamedTuple):
    """What a valid header says."""

    key: bytes
    num_bytes: int
    checksum: int
    tenant: str
    used_at: float  # wall clock, seconds: orders files of an earlier incarnation


class ObjectFiles:
    """The folder, locked for this process. Methods may be called from several threads.

    Raises:
        ConfigError: the folder cannot be used, or another node has it.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._direct = True
        self._started_at = time.time()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"ssd_path {root}: {error}", param="ssd_path") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"ssd_path {root} is in use by another node") from error

    def close(self) -> None:
        """Give the folder up; the files stay."""
        os.close(self._lock)

    def node_id(self) -> str:
        """The name of the node whose files these are; drawn with the first start."""
        path = self.root / "node_id"
        with contextlib.suppress(OSError):
            if name := path.read_text().strip():
                return name
        name = f"kvstore-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            path.write_text(name)
        return name

    def scan(self) -> Iterator[FileInfo]:
        """All files with a valid header; the others are removed. Bytes are not read."""
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            try:
                paths = list(folder.iterdir())
            except OSError as error:
                _log.warning("%s cannot be read: %s", folder, error)
                continue
            for path in paths:
                info = self._info(path)
                if info is not None and self.path(info.key) == path:
                    yield info
                else:
                    self._sweep(path)

    def path(self, key: bytes) -> Path:
        """Where an object lies or would lie."""
        name = key.hex()
        return self.root / name[:2] / name

    def write(self, info: FileInfo, body: memoryview) -> None:
        """Store an object.

        Args:
            body: its bytes up to the next block's end, block-aligned in memory.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        path = self.path(info.key)
        aside = path.with_name(f".{secrets.token_hex(8)}")
        path.parent.mkdir(exist_ok=True)
        try:
            with (
                _header_block(info) as header,
                self._opened(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, body.nbytes) as fd,
            ):
                _write_all(fd, header, body)
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise

    def read(self, info: FileInfo, body: memoryview) -> bool:
        """Read an object into the pool; False if the file is missing, torn or altered.

        Args:
            body: as in `write`.
        """
        path = self.path(info.key)
        try:
            with self._opened(path, os.O_RDONLY, body.nbytes) as fd, _block() as header:
                count = os.preadv(fd, [header, body], 0)
                while 0 < count - BLOCK_BYTES < body.nbytes and count % BLOCK_BYTES == 0:
                    more = os.preadv(fd, [body[count - BLOCK_BYTES :]], count)
                    if not more:
                        break
                    count += more
                whole = count == BLOCK_BYTES + body.nbytes
                own = _parse(bytes(header[: _HEADER.size]), 0.0)
        except OSError as error:
            _log.warning("%s cannot be read: %s", path, error)
            return False
        if not whole or own is None or (own.key, own.checksum) != (info.key, info.checksum):
            return False
        return xxh3_64(body[: info.num_bytes]) == info.checksum

    def remove(self, key: bytes) -> None:
        """Remove an object's file, if there is one."""
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int, num_bytes: int) -> Iterator[int]:
        direct = self._direct and num_bytes >= DIRECT_BYTES
        fd = self._open(path, flags | os.O_CLOEXEC, direct)
        try:
            yield fd
            if not direct:
                # the pool is the cache: a second copy in the page cache helps nobody
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _open(self, path: Path, flags: int, direct: bool) -> int:
        if direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    raise
                # tmpfs of older kernels, some network file systems
                _log.info("%s takes no direct I/O: %s", self.root, error)
                self._direct = False
                with contextlib.suppress(OSError):
                    if flags & os.O_CREAT:
                        path.unlink()
        return os.open(path, flags, 0o600)

    def _sweep(self, path: Path) -> None:
        """Remove what is no object, unless it is being written."""
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < self._started_at:
                path.unlink()

    def _info(self, path: Path) -> FileInfo | None:
        try:
            with open(path, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                info = _parse(file.read(_HEADER.size) or b"", found.st_mtime)
        except OSError:
            return None
        if info is None or found.st_size != BLOCK_BYTES + rounded(info.num_bytes):
            return None
        return info


def rounded(num_bytes: int) -> int:
    """Bytes in whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@contextlib.contextmanager
def _block() -> Iterator[memoryview]:
    """One block, aligned as direct I/O wants it."""
    with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as view:
        yield view


@contextlib.contextmanager
def _header_block(info: FileInfo) -> Iterator[memoryview]:
    # names are cut to the field: they only say whose quota is charged
    tenant = info.tenant.encode()[:_TENANT_BYTES].decode(errors="ignore").encode()
    head = _HEADER.pack(_MAGIC, info.key, tenant, info.num_bytes, info.checksum, 0)[:-8]
    with _block() as block:
        block[: _HEADER.size] = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
        yield block


def _write_all(fd: int, header: memoryview, body: memoryview) -> None:
    """
    Raises:
        OSError: the disk is full, say.
    """
    total = header.nbytes + body.nbytes
    count = os.pwritev(fd, [header, body], 0)
    while count < total:
        if count < BLOCK_BYTES or count % BLOCK_BYTES:
            raise OSError("a write stopped in the middle of a block")
        count += os.pwritev(fd, [body[count - BLOCK_BYTES :]], count)


def _parse(raw: bytes, used_at: float) -> FileInfo | None:
    if len(raw) != _HEADER.size:
        return None
    magic, key, tenant, num_bytes, checksum, head_checksum = _HEADER.unpack(raw)
    if magic != _MAGIC or head_checksum != xxhash.xxh3_64_intdigest(raw[:-8]) or not num_bytes:
        return None
    name = tenant.rstrip(b"\0").decode(errors="replace")
    return FileInfo(key, num_bytes, checksum, name, used_at)
