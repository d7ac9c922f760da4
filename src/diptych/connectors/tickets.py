"""Tickets: signed permission for one attempt at one request, made by routers alone.

Pure code: time comes from a `Clock`, the only I/O is reading the key file. A receiver admits a
ticket when its signature holds, its router is live, it names this worker's incarnation, its epoch
is new for its id, and its nonce was neither seen nor has left the window.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from diptych.clock import Clock
from diptych.errors import ConfigError, DuplicateRequestError, StaleTicketError
from diptych.proto import worker_pb2

logger = logging.getLogger(__name__)

LEAST_SECRET_BYTES = 16
MAX_KEYS = 2
NONCE_WINDOW = 4096
MAX_ROUTERS = 64

Signed = TypeVar(
    "Signed",
    worker_pb2.Ticket,
    worker_pb2.Hello,
    worker_pb2.HandoffChallenge,
    worker_pb2.HandoffHello,
    worker_pb2.DrainRequest,
)


def signed_bytes(ticket: worker_pb2.Ticket) -> bytes:
    """What the signature covers: every field but itself, in field order, length-prefixed."""
    parts = (
        ticket.request_id.encode(),
        ticket.router_incarnation.encode(),
        ticket.prefill_incarnation.encode(),
        ticket.decode_incarnation.encode(),
        ticket.epoch.to_bytes(8, "little"),
        ticket.nonce.to_bytes(8, "little"),
        ticket.ttl_ms.to_bytes(8, "little"),
        ticket.key_id.encode(),
    )
    return b"diptych-ticket-1" + _prefixed(parts)


def _bytes_of_router(hello: worker_pb2.Hello) -> bytes:
    """The same of the hello with which a router opens its stream."""
    parts = (
        hello.router_incarnation.encode(),
        hello.protocol_version.to_bytes(8, "little"),
        hello.worker_incarnation.encode(),
        hello.last_sequence.to_bytes(8, "little"),
        hello.audience.encode(),
        hello.key_id.encode(),
    )
    return b"diptych-router-1" + _prefixed(parts)


def _bytes_of_challenge(challenge: worker_pb2.HandoffChallenge) -> bytes:
    parts = (challenge.nonce, challenge.incarnation.encode(), challenge.key_id.encode())
    return b"diptych-challenge-1" + _prefixed(parts)


def _bytes_of_hello(hello: worker_pb2.HandoffHello) -> bytes:
    """The same of the hello with which a worker tells another how its memory is read."""
    parts = (
        hello.worker_id.encode(),
        hello.incarnation.encode(),
        hello.kv_namespace.encode(),
        hello.protocol_version.to_bytes(8, "little"),
        hello.cards,
        hello.key_id.encode(),
    )
    return b"diptych-hello-2" + _prefixed(parts)


def _bytes_of_drain(request: worker_pb2.DrainRequest) -> bytes:
    parts = (
        request.deadline_ms.to_bytes(8, "little"),
        request.incarnation.encode(),
        request.key_id.encode(),
    )
    return b"diptych-drain-1" + _prefixed(parts)


def _answering(challenge: worker_pb2.HandoffChallenge) -> bytes:
    """What the other side challenged with: signed as well, a message answers nothing else."""
    return _prefixed((challenge.nonce, challenge.incarnation.encode()))


def _prefixed(parts: Iterable[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class TicketKeys:
    """Up to two secrets by id: the first signs, all verify, so that keys rotate without a gap.

    The file has one `key_id:secret` a line, secret in hex (at least 16 bytes). A changed file is
    read again; one that cannot be read then leaves the old keys in force.
    """

    def __init__(self, secrets_by_id: dict[str, bytes], path: Path | None = None) -> None:
        self._keys = secrets_by_id
        self._path = path
        self._stamp = _stamp(path)

    @classmethod
    def load(cls, path: str | Path) -> TicketKeys:
        """Keys of a file.

        Raises:
            ConfigError: the file cannot be read or holds no valid keys.
        """
        return cls(_parse(Path(path)), Path(path))

    @classmethod
    def drawn(cls) -> TicketKeys:
        """One fresh key, for a system in which no other process verifies."""
        return cls({secrets.token_hex(4): secrets.token_bytes(32)})

    def sign(self, ticket: worker_pb2.Ticket) -> None:
        """Set the ticket's key id and signature."""
        self._sign(ticket, signed_bytes)

    def verify(self, ticket: worker_pb2.Ticket) -> bool:
        """Whether one of the keys made the signature."""
        return self._verify(ticket, signed_bytes)

    def sign_router(self, hello: worker_pb2.Hello) -> None:
        """Set key id and signature of a router's hello."""
        self._sign(hello, _bytes_of_router)

    def verify_router(self, hello: worker_pb2.Hello) -> bool:
        """Whether one of our routers said it."""
        return self._verify(hello, _bytes_of_router)

    def sign_drain(self, request: worker_pb2.DrainRequest) -> None:
        """Set key id and signature of a request that a worker drain."""
        self._sign(request, _bytes_of_drain)

    def verify_drain(self, request: worker_pb2.DrainRequest) -> bool:
        """Whether one who holds the keys asks for it."""
        return self._verify(request, _bytes_of_drain)

    def sign_challenge(
        self, challenge: worker_pb2.HandoffChallenge, theirs: worker_pb2.HandoffChallenge
    ) -> None:
        """Set key id and signature of a challenge that answers `theirs`."""
        self._sign(challenge, _bytes_of_challenge, _answering(theirs))

    def verify_challenge(
        self, challenge: worker_pb2.HandoffChallenge, ours: worker_pb2.HandoffChallenge
    ) -> bool:
        """Whether one of our workers has answered `ours` with it."""
        return self._verify(challenge, _bytes_of_challenge, _answering(ours))

    def sign_hello(
        self, hello: worker_pb2.HandoffHello, theirs: worker_pb2.HandoffChallenge
    ) -> None:
        """Set key id and signature of a hello that answers a challenge."""
        self._sign(hello, _bytes_of_hello, _answering(theirs))

    def verify_hello(
        self, hello: worker_pb2.HandoffHello, ours: worker_pb2.HandoffChallenge
    ) -> bool:
        """Whether one of our workers has answered our challenge with it."""
        return self._verify(hello, _bytes_of_hello, _answering(ours))

    def _sign(
        self, message: Signed, covered: Callable[[Signed], bytes], besides: bytes = b""
    ) -> None:
        self._refresh()
        message.key_id, secret = next(iter(self._keys.items()))
        message.signature = hmac.digest(secret, covered(message) + besides, hashlib.sha256)

    def _verify(
        self, message: Signed, covered: Callable[[Signed], bytes], besides: bytes = b""
    ) -> bool:
        self._refresh()
        secret = self._keys.get(message.key_id)
        if secret is None:
            return False
        expected = hmac.digest(secret, covered(message) + besides, hashlib.sha256)
        return hmac.compare_digest(expected, message.signature)

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if self._path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _parse(self._path)
        except ConfigError as error:
            logger.warning("ticket keys keep their old values: %s", error)


class TicketIssuer:
    """Makes the tickets of one router incarnation."""

    def __init__(self, keys: TicketKeys, router_incarnation: str) -> None:
        self.router_incarnation = router_incarnation
        self._keys = keys
        self._nonces: Iterator[int] = itertools.count(1)

    def issue(
        self,
        request_id: str,
        *,
        epoch: int,
        ttl_ms: int,
        prefill_incarnation: str = "",
        decode_incarnation: str = "",
    ) -> worker_pb2.Ticket:
        """A signed ticket with the next nonce. `epoch` must be above all earlier ones of the id."""
        ticket = worker_pb2.Ticket(
            request_id=request_id,
            router_incarnation=self.router_incarnation,
            prefill_incarnation=prefill_incarnation,
            decode_incarnation=decode_incarnation,
            epoch=epoch,
            nonce=next(self._nonces),
            ttl_ms=ttl_ms,
        )
        self._keys.sign(ticket)
        return ticket


class NonceWindow:
    """Which of the last `size` nonces were seen; older ones count as seen."""

    def __init__(self, size: int = NONCE_WINDOW) -> None:
        self._size = size
        self._highest = 0
        self._seen = 0  # bit i: nonce `highest - i`

    def is_new(self, nonce: int) -> bool:
        """Whether `nonce` is inside or above the window and unseen."""
        age = self._highest - nonce
        return nonce > 0 and (age < 0 or (age < self._size and not self._seen >> age & 1))

    def add(self, nonce: int) -> None:
        """Mark a nonce for which `is_new` holds."""
        shift = nonce - self._highest
        if shift >= self._size:
            self._seen, self._highest = 1, nonce
        elif shift > 0:
            mask = (1 << self._size) - 1
            self._seen, self._highest = (self._seen << shift | 1) & mask, nonce
        else:
            self._seen |= 1 << -shift


@dataclass(frozen=True, slots=True)
class AdmittedTicket:
    """A ticket that was checked; its time to live became a deadline on the receiver's clock."""

    request_id: str
    router_incarnation: str
    epoch: int
    deadline_s: float


@dataclass(slots=True)
class _Router:
    nonces: NonceWindow
    live: bool = True
    epochs: OrderedDict[str, int] = field(default_factory=OrderedDict)


class TicketVerifier:
    """What one worker has seen of every live router.

    Memory is bounded: epochs of the last `2 * window` ids per router. By the time an id is
    forgotten, the nonces of its tickets have left the window, so that none can come back.
    """

    def __init__(
        self,
        keys: TicketKeys | None,
        incarnation: str,
        clock: Clock,
        window: int = NONCE_WINDOW,
        max_routers: int = MAX_ROUTERS,
    ) -> None:
        """`keys` None: signatures are not checked. `incarnation`: this worker's."""
        self._keys = keys
        self._incarnation = incarnation
        self._clock = clock
        self._window = window
        self._max_routers = max_routers
        self._routers: OrderedDict[str, _Router] = OrderedDict()

    def router_joined(self, incarnation: str) -> None:
        """Admit tickets of this router. One that returns finds its nonces still remembered."""
        router = self._routers.setdefault(incarnation, _Router(NonceWindow(self._window)))
        router.live = True
        self._routers.move_to_end(incarnation)
        gone = [name for name, known in self._routers.items() if not known.live]
        for name in gone[: max(0, len(self._routers) - self._max_routers)]:
            del self._routers[name]

    def router_left(self, incarnation: str) -> None:
        """Refuse tickets of this router until it joins again. Unknown names are ignored."""
        if incarnation in self._routers:
            self._routers[incarnation].live = False

    def admit(self, ticket: worker_pb2.Ticket) -> AdmittedTicket:
        """Check a ticket and remember it; one that is refused changes nothing.

        Raises:
            DuplicateRequestError: this id and epoch were admitted already (a repeated Submit).
            StaleTicketError: anything else that is wrong with it.
        """
        router = self._check_sender(ticket)
        known = router.epochs.get(ticket.request_id, 0)
        if ticket.epoch == known:
            raise DuplicateRequestError(f"{ticket.request_id} epoch {ticket.epoch} was admitted")
        if ticket.epoch < known:
            raise StaleTicketError(
                f"epoch {ticket.epoch} of {ticket.request_id} is past: {known} was admitted"
            )
        if not router.nonces.is_new(ticket.nonce):
            raise StaleTicketError(f"nonce {ticket.nonce} was seen or is too old")
        router.nonces.add(ticket.nonce)
        router.epochs[ticket.request_id] = ticket.epoch
        router.epochs.move_to_end(ticket.request_id)
        if len(router.epochs) > 2 * self._window:
            router.epochs.popitem(last=False)
        return AdmittedTicket(
            request_id=ticket.request_id,
            router_incarnation=ticket.router_incarnation,
            epoch=ticket.epoch,
            deadline_s=self._clock.monotonic() + ticket.ttl_ms / 1000,
        )

    def _check_sender(self, ticket: worker_pb2.Ticket) -> _Router:
        """The ticket's router, if it is genuine, live, and speaks to this incarnation."""
        if self._keys is not None and not self._keys.verify(ticket):
            raise StaleTicketError("the ticket's signature does not hold")
        if ticket.epoch < 1 or not ticket.request_id:
            raise StaleTicketError("the ticket has no request id or no epoch")
        router = self._routers.get(ticket.router_incarnation)
        if router is None or not router.live:
            raise StaleTicketError(f"router {ticket.router_incarnation!r} has no stream here")
        if self._incarnation not in (ticket.prefill_incarnation, ticket.decode_incarnation):
            raise StaleTicketError("the ticket is for another incarnation of this worker")
        return router


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None where there is none."""
    if path is None:
        return None
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _parse(path: Path) -> dict[str, bytes]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ticket keys {path} cannot be read: {error}") from error
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key_id, _, secret = line.strip().partition(":")
        if key_id in keys:
            raise ConfigError(f"{path} line {number} repeats the key id {key_id}")
        try:
            keys[key_id] = bytes.fromhex(secret)
        except ValueError:
            keys[key_id] = b""
        if not key_id or len(keys[key_id]) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"{path} line {number} is not key_id:secret with {LEAST_SECRET_BYTES} or more "
                "bytes of hex"
            )
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"{path} must hold one or two ticket keys, not {len(keys)}")
    return keys
