"""Links: which transport each peer is read over, found by testing."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Memory,
    Peer,
    ReadState,
    Transport,
)
from diptych.connectors.transports.self_test import SelfTest
from diptych.errors import TransferError

_log = logging.getLogger(__name__)

# a transport later in the order must be this much faster to be taken instead
MARGIN = 1.2


class LinkState(enum.Enum):
    """Whether a peer can be read."""

    TESTING = "testing"
    READY = "ready"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Link:
    """One peer, and what the tests found: GB/s of each transport that passed, why others did not.

    READY as soon as one transport passed; a later one takes over where it is clearly faster.
    """

    peer_id: str
    endpoint: Endpoint
    state: LinkState = LinkState.TESTING
    transport: Transport | None = None
    peer: Peer | None = None
    gb_per_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether reads may be given to it, or wait for its test."""
        return self.state is not LinkState.DOWN and not (self.peer is not None and self.peer.gone)

    @property
    def bandwidth_gb_per_s(self) -> float:
        """Of the transport that is used; 0 for none."""
        return 0.0 if self.transport is None else self.gb_per_s[self.transport.name]


class Links:
    """All peers of one process. One thread's; tests run one after another."""

    def __init__(
        self,
        transports: Sequence[Transport],
        landing: Memory,
        monotonic: Callable[[], float],
        test_timeout_s: float,
    ) -> None:
        """`transports` in order of preference."""
        self._transports = transports
        self._landing = landing
        self._monotonic = monotonic
        self._test_timeout_s = test_timeout_s
        self._links: dict[str, Link] = {}
        self._to_test: deque[tuple[Link, Transport]] = deque()
        self._test: tuple[Link, Transport, Peer, SelfTest] | None = None

    def get(self, peer_id: str) -> Link | None:
        return self._links.get(peer_id)

    @property
    def all(self) -> Mapping[str, Link]:
        return self._links

    @property
    def testing(self) -> bool:
        return self._test is not None or bool(self._to_test)

    def add(self, peer_id: str, endpoint: Endpoint) -> Link:
        """Test a peer over every transport that both sides have. One that is known under this id
        is replaced, unless nothing changed and it works."""
        known = self._links.get(peer_id)
        if known is not None:
            if known.endpoint == endpoint and known.usable:
                return known
            self.remove(peer_id)
        link = self._links[peer_id] = Link(peer_id, endpoint)
        candidates = [t for t in self._transports if t.supports(endpoint, KV)]
        self._to_test.extend((link, transport) for transport in candidates)
        if not candidates:
            link.state = LinkState.DOWN
            link.failures["*"] = "no transport is common to both sides"
        return link

    def remove(self, peer_id: str) -> None:
        """Let a peer go, its tests too."""
        link = self._links.pop(peer_id, None)
        if link is None:
            return
        self._to_test = deque(entry for entry in self._to_test if entry[0] is not link)
        if self._test is not None and self._test[0] is link:
            _, transport, peer, _ = self._test
            transport.disconnect(peer)
            self._test = None
        if link.transport is not None and link.peer is not None:
            link.transport.disconnect(link.peer)
        link.state = LinkState.DOWN

    def poll(self) -> None:
        """Advance the test that runs, or begin the next."""
        if self._test is None:
            self._begin()
        if self._test is None:
            return
        link, transport, peer, test = self._test
        state = test.poll()
        if state is ReadState.PENDING:
            return
        self._test = None
        if state is ReadState.DONE:
            self._passed(link, transport, peer, test.gb_per_s)
        else:
            transport.disconnect(peer)
            self._failed(link, transport, test.failure)

    def _begin(self) -> None:
        while self._to_test and self._test is None:
            link, transport = self._to_test.popleft()
            try:
                peer = transport.connect(link.endpoint)
            except TransferError as error:
                self._failed(link, transport, error.message)
                continue
            except Exception as error:
                # what a peer says of itself must not end the reads of others
                _log.exception("peer %s offers what %s cannot take", link.peer_id, transport.name)
                self._failed(link, transport, type(error).__name__)
                continue
            deadline_s = self._monotonic() + self._test_timeout_s
            test = SelfTest(transport, peer, self._landing, deadline_s)
            self._test = link, transport, peer, test

    def _passed(self, link: Link, transport: Transport, peer: Peer, gb_per_s: float) -> None:
        link.gb_per_s[transport.name] = gb_per_s
        old, old_peer = link.transport, link.peer
        if old is not None and gb_per_s < MARGIN * link.bandwidth_gb_per_s:
            transport.disconnect(peer)
            return
        link.transport, link.peer, link.state = transport, peer, LinkState.READY
        _log.info("peer %s over %s: %.2f GB/s", link.peer_id, transport.name, gb_per_s)
        if old is not None and old_peer is not None:
            old.disconnect(old_peer)

    def _failed(self, link: Link, transport: Transport, why: str) -> None:
        link.failures[transport.name] = why
        _log.warning("peer %s cannot be read over %s: %s", link.peer_id, transport.name, why)
        if link.transport is None and all(entry[0] is not link for entry in self._to_test):
            link.state = LinkState.DOWN
