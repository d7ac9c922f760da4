"""The thread of direct hand-offs: it alone drives their machines, with the clock, the control
socket and the transfer thread's results. It waits for no step of the model, and no step for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

from diptych.connectors.base import KVLayout
from diptych.connectors.direct_attempt import TakenPrompt
from diptych.connectors.direct_given import GivenPrompt, GivenPrompts
from diptych.connectors.direct_messages import TO_DECODE, HandoffMessage
from diptych.connectors.direct_peers import DirectPeers
from diptych.connectors.direct_reports import DirectReports
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_shortcut import Shortcut
from diptych.connectors.direct_taken import TakenPrompts
from diptych.connectors.direct_times import HandoffTimes
from diptych.connectors.kv_checksums import Checksums
from diptych.connectors.peer_reads import (
    PeerReads,
    RankCard,
    decode_cards,
    encode_cards,
    geometry_of,
)
from diptych.connectors.transports.choose import open_transports
from diptych.connectors.transports.memory import DeviceMemory, HostMemory
from diptych.connectors.transports.thread import TransferThread
from diptych.engine.control_messages import (
    Control,
    HandoffFigures,
    PeerDown,
    PeerLink,
    PeerUp,
    ToControl,
)
from diptych.engine.control_port import ControlPort
from diptych.errors import DiptychError
from diptych.fault_points import reach
from diptych.log_limit import LogLimit

_log = logging.getLogger(__name__)

_JOIN_S = 10.0
_FLUSH_S = 1e-3


class DirectDriver:
    """Methods may be called from any thread and never wait (`close` and `flush` do)."""

    def __init__(
        self,
        settings: DirectSettings,
        memory: HostMemory | DeviceMemory,
        layout: KVLayout,
        *,
        checksums: Checksums | None = None,
        reads_peers: bool = True,
        stores: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the transports, and serves the pool to whoever has its cards.

        Args:
            checksums: of the pool; None compares nothing.
            stores: whether a connector beside keeps KV in a store, and finds it there.
            reads_peers: whether peers are met as soon as they are known, to be read.

        Raises:
            ConfigError: a setting that a transport cannot use.
            TransferError: no transport can reach the pool.
        """
        self.reports = DirectReports(monotonic)
        self._settings = settings
        self._monotonic = monotonic
        self._geometry = geometry_of(layout)
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._port: ControlPort | None = None
        self._ready: set[int] = set()
        self._figures = HandoffFigures()
        self._given_times = HandoffTimes()
        self._closing = False
        self._complaints = LogLimit(_log)
        names = settings.transport_names
        self._transfer = TransferThread(
            open_transports(names, settings.for_transports(memory.device)),
            memory,
            uuid4().hex,
            test_timeout_s=settings.test_s,
            on_result=self._wake,
        )
        try:
            self._endpoint = self._transfer.start()
        except BaseException:
            os.close(self._wake_fd)
            raise
        self._shortcut = Shortcut() if settings.shortcut else None
        self._reads = PeerReads(self._transfer, self._geometry, "")
        self._peers = DirectPeers(
            self._reads,
            self._transfer,
            self._tell_link,
            monotonic,
            geometry=self._geometry,
            reads_peers=reads_peers,
            verify_kv=settings.verify_kv,
            on_gpu=memory.device != "cpu",
        )
        self._given = GivenPrompts(
            settings,
            self.reports,
            self._send,
            monotonic,
            block_size=layout.block_size,
            checksums=checksums,
            stores=stores,
        )
        self._taken = TakenPrompts(
            settings,
            self.reports,
            self._send,
            self._reads,
            monotonic,
            knows=self._peers.__contains__,
            granule=self._peers.granule,
            source_block=self._peers.source_block,
            relink=self._peers.connect,
            checksums=checksums,
            stores=stores,
        )
        self._thread = threading.Thread(target=self._run, name="kv-handoff", daemon=True)

    def start(self, kv_namespace: str) -> bytes:
        """Begin; returns this engine's cards for its peers (`peer_reads.encode_cards`)."""
        self._reads = PeerReads(self._transfer, self._geometry, kv_namespace)
        self._peers.use(self._reads)
        self._taken.use(self._reads)
        self._thread.start()
        card = RankCard(
            kv_namespace=kv_namespace,
            rank=0,
            geometry=self._geometry,
            endpoint=self._endpoint,
            shortcut=None if self._shortcut is None else self._shortcut.card,
        )
        return encode_cards([card])

    def attach(self, port: ControlPort) -> None:
        """Take over the way to peers."""
        self._command(lambda: self._attach(port))

    # --- for the scheduler half

    def begin(self, prompt: GivenPrompt) -> None:
        """See `GivenPrompts`, as for the next four."""
        self._command(lambda: self._given.begin(prompt))

    def computed(self, request_id: str, num_tokens: int, block_ids: Sequence[int]) -> None:
        self._command(lambda: self._given.computed(request_id, num_tokens, block_ids))

    def done(
        self,
        request_id: str,
        num_tokens: int,
        block_ids: Sequence[int],
        token_id: int,
        num_cached_tokens: int,
    ) -> None:
        began_s = self._monotonic()

        def done() -> None:
            self._given.done(request_id, num_tokens, block_ids, token_id, num_cached_tokens)
            self._given_times.add("computed to COMMIT", self._monotonic() - began_s)

        self._command(done)

    def flush(self) -> None:
        """Leave the interpreter to the thread until it has done what it was told; not for long."""
        done = threading.Event()
        self._command(done.set)
        done.wait(_FLUSH_S)

    def preempted(self, request_id: str) -> None:
        self._command(lambda: self._given.preempted(request_id))

    def given_released(self, request_id: str) -> None:
        self._command(lambda: self._given.released(request_id))

    def offer(self, prompt: TakenPrompt) -> None:
        """See `TakenPrompts`, as for the next two."""
        self._command(lambda: self._taken.offer(prompt))

    def reserved(self, request_id: str, local_tokens: int, block_ids: Sequence[int]) -> None:
        self._command(lambda: self._taken.reserved(request_id, local_tokens, block_ids))

    def taken_released(self, request_id: str) -> None:
        self._command(lambda: self._taken.released(request_id))

    def close(self) -> None:
        """End the thread and the transfers; after it nothing is written. Idempotent."""
        if self._closing:
            return
        self._command(self._begin_closing)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        self._closing = True
        self._transfer.close()
        given, taken = self._given, self._taken
        _log.info(
            "hand-offs: %d given and read, %d left to the store, %d not; %d received, %d left to "
            "the store, %d not (%d corrupt); %d events without a rule; %d messages sent past the "
            "services",
            given.num_valid,
            given.num_stored,
            given.num_gone,
            taken.num_received,
            taken.num_stored,
            taken.failures.total(),
            taken.num_corrupt,
            given.ignored.total() + taken.ignored.total(),
            0 if self._shortcut is None else self._shortcut.num_sent,
        )
        if ignored := given.ignored + taken.ignored:
            kinds = (f"{kind}: {count}" for kind, count in ignored.most_common())
            _log.info("events without a rule: %s", ", ".join(kinds))
        if times := self._given_times.summary():
            _log.info("given hand-offs, medians: %s", times)
        if times := taken.times.summary():
            taken_in = self.reports.times.summary()
            _log.info("received hand-offs, medians: %s, %s", times, taken_in)
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        if self._port is not None:
            self._port.close()
        if self._shortcut is not None:
            self._shortcut.close()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # --- the thread

    def _run(self) -> None:
        while not self._closing:
            self._guarded(self._wait)
            self._guarded(self._turn)

    def _guarded(self, work: Callable[[], None]) -> None:
        """One hand-off's fault must not end the others: deadlines find what it left."""
        try:
            work()
        except Exception:
            _log.exception("the hand-off thread met an error")

    def _turn(self) -> None:
        for command in self._take_commands():
            self._guarded(command)
        if self._shortcut is not None and self._shortcut.fileno() in self._ready:
            self._guarded(partial(self._take_past, self._shortcut))
        if self._port is not None:
            self._port.flush()
            if self._port.fileno() in self._ready:
                for message in self._port.receive():
                    self._guarded(partial(self._take, message))
        for result in self._reads.take_results():
            reach("handoff.read")
            self._guarded(partial(self._taken.read_ended, result))
        self._guarded(self._given.tick)
        self._guarded(self._taken.tick)
        self._guarded(self._peers.tick)
        self._tell_figures()

    def _tell_figures(self) -> None:
        given, taken = self._given, self._taken
        now = HandoffFigures(
            num_read=given.num_valid,
            num_not_read=given.num_gone,
            num_given_to_store=given.num_stored,
            num_tokens_given=given.num_tokens,
            num_received=taken.num_received,
            num_taken_from_store=taken.num_stored,
            num_tokens_received=taken.num_tokens,
            num_corrupt=taken.num_corrupt,
            num_ignored_events=given.ignored.total() + taken.ignored.total(),
            read_seconds=round(self._transfer.counters.read_seconds, 3),
            # it grows whenever anything waits: coarse, so that it is not told all the time
            late_seconds=round(self._transfer.counters.late_s, 1),
            failures=dict(taken.failures),
        )
        if now != self._figures and self._port is not None:
            self._figures = now
            self._port.send(now)

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _wait(self) -> None:
        """Until something is to be done. Each call of the system gives the interpreter away, and
        the model's thread may keep it for a while: there is none too many."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._shortcut is not None and not self._shortcut.closed:
            poller.register(self._shortcut, select.POLLIN)
        if self._port is not None and not self._port.closed:
            unsent = select.POLLOUT if self._port.has_unsent else 0
            poller.register(self._port, select.POLLIN | unsent)
        self._ready = {fd for fd, _ in poller.poll(self._sleep_ms())}
        if self._wake_fd in self._ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _sleep_ms(self) -> int | None:
        times = [self._given.next_at_s(), self._taken.next_at_s(), self._peers.next_at_s()]
        now = self._monotonic()
        known = [time_s - now for time_s in times if time_s is not None]
        return max(0, math.ceil(min(known) * 1e3)) if known else None

    def _attach(self, port: ControlPort) -> None:
        self._port = port

    def _begin_closing(self) -> None:
        self._closing = True

    def _take(self, message: ToControl) -> None:
        try:
            if isinstance(message, Control):
                self._take_message(message.peer, HandoffMessage.decode(message.body))
            elif isinstance(message, PeerUp):
                self._meet(message.peer, decode_cards(message.cards))
            elif isinstance(message, PeerDown):
                self._part(message.peer)
        except DiptychError as error:
            self._complaints.warning("peer %s: %s", message.peer, error.message)

    def _meet(self, peer: str, cards: list[RankCard]) -> None:
        if self._shortcut is not None:
            self._shortcut.meet(peer, cards[0].shortcut if cards else None)
        self._peers.meet(peer, cards)

    def _take_past(self, shortcut: Shortcut) -> None:
        received = shortcut.receive()
        if received is not None:
            self._take(Control(*received))

    def _take_message(self, peer: str, message: HandoffMessage) -> None:
        reach(f"handoff.got_{message.kind.value.lower()}")
        if message.kind in TO_DECODE:
            self._taken.take(peer, message)
        else:
            self._given.take(peer, message)

    def _send(self, peer: str, message: HandoffMessage) -> None:
        reach(f"handoff.send_{message.kind.value.lower()}")
        body = message.encode()
        if self._shortcut is not None and self._shortcut.send(peer, body):
            return
        if self._port is not None:
            self._port.send(Control(peer, body))

    def _part(self, peer: str) -> None:
        self._given.peer_gone(peer)
        self._taken.peer_gone(peer, "the prefill worker is gone")
        self._peers.part(peer)
        if self._shortcut is not None:
            self._shortcut.part(peer)

    def _tell_link(self, link: PeerLink) -> None:
        if self._port is not None:
            self._port.send(link)
