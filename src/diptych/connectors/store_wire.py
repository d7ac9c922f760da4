"""How a KV-store node's bytes travel: the mapped pool's socket and the byte stream.

Both begin with `hello(token)`; the token comes from GetNode. On the unix socket the node answers
with the pool's size and, as ancillary data, its memfd. On the stream it answers with one byte and
then takes frames:

    FRAME  op, id, num_bytes   WRITE (id: a put; num_bytes of payload follow) or READ (id: a lease)
    ANSWER status, num_bytes   one per frame, in order; the payload of a READ follows

Little-endian. Nothing of it is acted on before the token is right.
"""

from __future__ import annotations

import struct
from pathlib import Path

TOKEN_BYTES = 32
MAGIC = b"DKV1"
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
WELCOME = b"\x01"
WRITE = 1
READ = 2
FRAME = struct.Struct("<BQQ")
# statuses are those of ItemStatus
ANSWER = struct.Struct("<BQ")
POOL_SIZE = struct.Struct("<Q")
# Who receives an object is woken by so many bytes of it at once: a wake-up costs its sender as much
# as tens of kilobytes.
WAKE_BYTES = 512 << 10


def hello(token: bytes) -> bytes:
    """The first bytes of a connection."""
    return MAGIC + token


def wake_bytes(num_left: int) -> int:
    """How many of the bytes that are left of an object to wait for (SO_RCVLOWAT), and 1 for a
    header: never more than will come, or the end of the object would wait for the next one."""
    return max(1, min(num_left, WAKE_BYTES))


def socket_name(address: str) -> str:
    """What to bind or connect for a `memory_socket`: `@name` is an abstract one, else a path."""
    return "\0" + address[1:] if address.startswith("@") else address


def boot_id() -> str:
    """The kernel's boot id: equal on all processes of one host, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
