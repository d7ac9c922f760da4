"""The peers of a direct hand-off: their cards, the links to their memory, and tests of those."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from diptych.connectors.link_retries import LinkRetries
from diptych.connectors.peer_reads import PeerReads, RankCard
from diptych.connectors.plan_geometry import PoolGeometry
from diptych.connectors.transports.links import LinkState
from diptych.connectors.transports.orders import LinkReport
from diptych.engine.control_messages import PeerLink
from diptych.errors import TransferError

_LOOK_S = 0.02
# how soon a link that was lost is noticed though nothing is read
_IDLE_LOOK_S = 1.0
# what reads a GPU's memory where it lies: over NVLink, PCIe or RDMA
GPU_LINKS = ("cuda_ipc", "nixl")


class LinkReports(Protocol):
    """What is needed of `transports.thread.TransferThread`."""

    def links(self) -> Mapping[str, LinkReport]: ...


class DirectPeers:
    """All peers of an engine. One thread's.

    Args:
        reads: connects peers, and reads them.
        reports: says how links stand.
        tell: takes each change of a link.
        geometry: of this engine's pool.
        reads_peers: whether peers are met as soon as they are known, to be read.
        verify_kv: whether to compare checksums; None: but over links of GPUs (`GPU_LINKS`), which
            correct their errors themselves.
        on_gpu: whether this engine's pool lies on a GPU.
    """

    def __init__(
        self,
        reads: PeerReads,
        reports: LinkReports,
        tell: Callable[[PeerLink], None],
        monotonic: Callable[[], float],
        *,
        geometry: PoolGeometry,
        reads_peers: bool,
        verify_kv: bool | None = True,
        on_gpu: bool = False,
    ) -> None:
        self._reads = reads
        self._reports = reports
        self._tell = tell
        self._monotonic = monotonic
        self._geometry = geometry
        self._reads_peers = reads_peers
        self._verify_kv = verify_kv
        self._trusted = GPU_LINKS if on_gpu else ()
        self._cards: dict[str, list[RankCard]] = {}
        self._links: dict[str, PeerLink] = {}
        self._retries = LinkRetries(monotonic)
        # in this turn: what is reported of them is old
        self._just_connected: set[str] = set()

    def __contains__(self, peer: str) -> bool:
        return peer in self._cards

    def use(self, reads: PeerReads) -> None:
        """Connect and read by these, before the first peer."""
        self._reads = reads

    def meet(self, peer: str, cards: list[RankCard]) -> None:
        """The peer is there, and can be read by its cards."""
        self._cards[peer] = cards
        if self._reads_peers:
            self.connect(peer)

    def connect(self, peer: str) -> None:
        """Test the link to a peer, unless it works; in vain where its KV is of no use here."""
        if peer not in self._cards:
            return
        self._just_connected.add(peer)
        try:
            self._reads.connect(peer, self._cards[peer])
        except TransferError as error:
            self._note(PeerLink(peer, False, failure=error.message))
            return
        if peer not in self._links or not self._links[peer].usable:
            self._note(PeerLink(peer, False))

    def part(self, peer: str) -> None:
        """That incarnation is gone for good."""
        self._reads.disconnect(peer)
        self._cards.pop(peer, None)
        self._links.pop(peer, None)
        self._retries.forget(peer)

    def tick(self) -> None:
        """Say what became of tests, and of links that worked; test again what is due."""
        if not self._links:
            return
        for peer in self._retries.take_due():
            self.connect(peer)
        reports = self._reports.links()
        for peer, known in list(self._links.items()):
            if peer in self._just_connected:
                continue
            ranks = self._reads.source_ranks(peer)
            links = [reports.get(f"{peer}/{rank}") for rank in ranks]
            now = _summary(peer, [link for link in links if link is not None])
            if now is None or now == known:
                continue
            self._note(now)
            if now.usable:
                self._retries.forget(peer)
            else:
                self._retries.failed(peer)
        self._just_connected.clear()

    def next_at_s(self) -> float | None:
        """When `tick` has something to do; None: never."""
        times = [self._retries.next_at_s()]
        if any(not link.usable and not link.failure for link in self._links.values()):
            times.append(self._monotonic() + _LOOK_S)
        elif any(link.usable for link in self._links.values()):
            times.append(self._monotonic() + _IDLE_LOOK_S)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def granule(self, peer: str) -> int:
        """Tokens that a range is a multiple of: no block of either side is read in two parts."""
        theirs = [card.geometry.block_size for card in self._cards.get(peer, [])]
        return math.lcm(self._geometry.block_size, *theirs)

    def source_block(self, peer: str) -> int:
        """Tokens of its blocks; 0 where its checksums, which are of whole tokens, are not ours to
        compare: they are where one rank holds what we hold, and the link is to be verified."""
        cards = self._cards.get(peer, [])
        if len(cards) != 1 or not self._verifies(peer):
            return 0
        theirs, ours = cards[0].geometry, self._geometry
        alike = (theirs.heads, theirs.layers, theirs.axes) == (ours.heads, ours.layers, ours.axes)
        return theirs.block_size if alike else 0

    def _verifies(self, peer: str) -> bool:
        if self._verify_kv is not None:
            return self._verify_kv
        link = self._links.get(peer)
        return link is None or link.transport not in self._trusted

    def _note(self, link: PeerLink) -> None:
        self._links[link.peer] = link
        self._tell(link)


def _summary(peer: str, links: Sequence[LinkReport]) -> PeerLink | None:
    """All ranks of a peer as one; None while a test runs."""
    for link in links:
        if link.state is LinkState.DOWN:
            why = "; ".join(f"{name}: {text}" for name, text in link.failures.items())
            return PeerLink(peer, False, failure=why or "the connection was lost")
    if not links or any(link.state is LinkState.TESTING for link in links):
        return None
    slowest = min(links, key=lambda link: link.bandwidth_gb_per_s)
    return PeerLink(peer, True, slowest.transport, round(slowest.bandwidth_gb_per_s, 2))
