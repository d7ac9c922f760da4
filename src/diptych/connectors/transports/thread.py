"""The transfer thread: it alone owns the transports of an engine process.

It serves this process's KV to its peers and reads theirs. Everything else gives it orders and takes
results, without ever waiting:

    thread = TransferThread([NixlTransport(), ShmTransport(), TcpTransport()], memory, incarnation)
    endpoint = thread.start()               # to be published; peers connect with it
    thread.connect("prefill-3/0", endpoint_of_the_peer)
    thread.read(ReadOrder(read_id="r1/1/0", peer_id="prefill-3/0", runs=runs, deadline_s=...))
    for result in thread.take_results(): ...

A read gives one result that is DONE or FAILED, when its target is written no more. One that fails
but cannot be proved to be over gives a QUARANTINED result first: go on without it, and keep its
blocks until the FAILED one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from diptych.connectors.store_wire import boot_id
from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Memory,
    ReadFailure,
    ReadState,
    Transport,
)
from diptych.connectors.transports.links import Links
from diptych.connectors.transports.orders import (
    LinkReport,
    PendingRead,
    ReadOrder,
    ReadResult,
    TransferCounters,
)
from diptych.connectors.transports.self_test import LANDING, PROBE, Probe
from diptych.errors import TransferError

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.1e-3
_MAX_READS = 4096
# how often a test, or an event that a read waits for, is looked at
_LOOK_S = 0.2e-3
_QUARANTINE_LOOK_S = 10e-3
_JOIN_S = 10.0
# poll counts in milliseconds; what is shorter is slept
_POLL_RESOLUTION_S = 1e-3
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


class TransferThread:
    """Public methods may be called from any thread, and never block (`start`, `close` do)."""

    def __init__(
        self,
        transports: Sequence[Transport],
        memory: Memory,
        incarnation: str,
        *,
        test_timeout_s: float = 2.0,
        on_result: Callable[[], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            transports: in order of preference; the thread closes them.
            memory: the KV pool.
            incarnation: of this process.
            on_result: called on the transfer thread after results were added; must be quick.
        """
        self.counters = TransferCounters()
        self._transports = transports
        self._memory = memory
        self._incarnation = incarnation
        self._on_result = on_result
        self._monotonic = monotonic
        self._probe = Probe.make(memory.device, incarnation)
        self._links = Links(transports, self._probe.landing, monotonic, test_timeout_s)
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._results: deque[ReadResult] = deque()
        self._reads: dict[str, PendingRead] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._closing = False
        self._started: threading.Event = threading.Event()
        self._endpoint: Endpoint | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> Endpoint:
        """Register the memory with every transport and begin to serve.

        Raises:
            ConfigError: an address cannot be bound, or not be reached by others.
            TransferError: no transport can use the memory.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._endpoint is not None
        return self._endpoint

    def connect(self, peer_id: str, endpoint: Endpoint) -> None:
        """Test a peer and keep it; reads may be ordered at once. A peer that is known is tested
        again only if its endpoint changed or its connection was lost."""
        self._command(lambda: self._add_link(peer_id, endpoint))

    def disconnect(self, peer_id: str) -> None:
        """Let a peer go: its reads are cancelled, its memory is released."""
        self._command(lambda: self._disconnect(peer_id))

    def read(self, order: ReadOrder) -> None:
        """Order a read. Its id must not be in use."""
        self._command(lambda: self._take_order(order))

    def cancel(self, read_id: str) -> None:
        """Give a read up; it still gives its result. Unknown ids are ignored."""
        self._command(lambda: self._cancel(read_id))

    def take_results(self) -> list[ReadResult]:
        """What came since the last call."""
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results

    def links(self) -> dict[str, LinkReport]:
        """All peers."""
        return {peer_id: LinkReport.of(link) for peer_id, link in list(self._links.all.items())}

    def close(self) -> None:
        """Cancel what is left and end the thread. After it nothing is written. Idempotent."""
        if not self._thread.is_alive() and self._closing:
            return
        self._command(self._begin_closing)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("the transfer thread did not end within %g s", _JOIN_S)

    def _command(self, command: Callable[[], None]) -> None:
        # under the lock the thread does not end: its descriptor is nobody else's yet
        with self._lock:
            self._commands.append(command)
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # --- the thread

    def _run(self) -> None:
        try:
            self._use_device()
            self._endpoint = self._open()
        except Exception as error:
            self._error = error
        self._started.set()
        while self._error is None and not self._closing:
            try:
                self._turn()
            except Exception:
                # a fault of ours must not strand blocks: the reads fail, the thread goes on
                _log.exception("the transfer thread met an error")
                self._fail_all()
        self._fail_all()
        for transport in self._transports:
            transport.close()
        self._probe.close()
        self._report_reads()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _use_device(self) -> None:
        """Make the device's context this thread's: UCX registers and copies in the current one.
        And let short sleeps be short: the kernel adds 50 µs otherwise."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
        if self._memory.device != "cpu":
            import torch

            torch.cuda.set_device(self._memory.device)
            torch.cuda.synchronize()

    def _open(self) -> Endpoint:
        offers, usable = [], 0
        regions = {KV: self._memory, PROBE: self._probe.probe, LANDING: self._probe.landing}
        for transport in self._transports:
            try:
                for name, memory in regions.items():
                    transport.register(name, memory)
            except TransferError as error:
                _log.warning("no transfers over %s: %s", transport.name, error)
                continue
            usable += 1
            offer = transport.offer()
            if offer is not None:
                offers.append(offer)
            for fd in transport.waitables():
                self._poller.register(fd, select.POLLIN)
        if not usable:
            raise TransferError("no transport can reach the KV pool")
        return Endpoint(
            incarnation=self._incarnation,
            boot_id=boot_id(),
            regions={name: memory.num_bytes for name, memory in regions.items()},
            devices={name: memory.device for name, memory in regions.items()},
            offers=offers,
            probe_checksum=self._probe.checksum,
        )

    def _turn(self) -> None:
        self._wait()
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        for transport in self._transports:
            transport.progress()
        self._links.poll()
        for read in list(self._reads.values()):
            self._advance(read)
        self._report_reads()

    def _wait(self) -> None:
        timeout_s = self._sleep_s()
        started_s = time.monotonic()
        if timeout_s is None or timeout_s >= _POLL_RESOLUTION_S:
            ready = self._poller.poll(None if timeout_s is None else timeout_s * 1e3)
        else:
            ready = self._poller.poll(0)
            if not ready and timeout_s:
                time.sleep(timeout_s)
        self.counters.wakes += 1
        if not ready and timeout_s:
            self.counters.late_s += max(0.0, time.monotonic() - started_s - timeout_s)
        for fd, _ in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)

    def _sleep_s(self) -> float | None:
        """Until the next tick of a transport, the next deadline, or a test's or mark's look."""
        ticks = [transport.tick_s() for transport in self._transports]
        if self._links.testing:
            ticks.append(_LOOK_S)
        now = self._monotonic()
        for read in self._reads.values():
            if read.handle is None:
                ticks.append(_LOOK_S)
            left_s = read.order.deadline_s - now
            ticks.append(_QUARANTINE_LOOK_S if read.state is not ReadState.PENDING else left_s)
        known = [max(0.0, tick) for tick in ticks if tick is not None]
        return min(known, default=None)

    def _add_link(self, peer_id: str, endpoint: Endpoint) -> None:
        self._links.add(peer_id, endpoint)

    def _disconnect(self, peer_id: str) -> None:
        for read in self._reads.values():
            if read.order.peer_id == peer_id:
                read.cancel()
        self._links.remove(peer_id)

    def _take_order(self, order: ReadOrder) -> None:
        read = PendingRead(order, self._monotonic())
        if order.read_id not in self._reads and len(self._reads) < _MAX_READS:
            self._reads[order.read_id] = read
            return
        known = order.read_id in self._reads
        read.fail(ReadFailure.REFUSED, "its id is in use" if known else "too many reads")
        self._add_result(read)

    def _cancel(self, read_id: str) -> None:
        if read := self._reads.get(read_id):
            read.cancel()

    def _advance(self, read: PendingRead) -> None:
        """Post a read once its link and its mark are ready; poll it after that."""
        if read.handle is not None:
            read.poll()
            return
        link = self._links.get(read.order.peer_id)
        if read.cancelled:
            read.fail(ReadFailure.CANCELLED)
        elif self._monotonic() >= read.order.deadline_s:
            read.fail(ReadFailure.DEADLINE)
        elif link is None:
            read.fail(ReadFailure.PEER_GONE, "no such peer is connected")
        elif not link.usable:
            read.fail(ReadFailure.PEER_GONE, "; ".join(link.failures.values()))
        elif link.transport is not None and (read.order.mark is None or read.order.mark.query()):
            read.post(link)

    def _report_reads(self) -> None:
        added = False
        for read_id, read in list(self._reads.items()):
            if read.ended:
                del self._reads[read_id]
            elif read.state is ReadState.PENDING or read.quarantine_reported:
                continue
            else:
                read.quarantine_reported = True
            self._add_result(read)
            added = True
        if added and self._on_result is not None:
            self._on_result()

    def _add_result(self, read: PendingRead) -> None:
        result = read.result(self._monotonic())
        if read.ended:
            self.counters.count(result)
        with self._lock:
            self._results.append(result)

    def _fail_all(self) -> None:
        for read in self._reads.values():
            if read.handle is None:
                read.fail(ReadFailure.CLOSED)
            else:
                read.cancel()

    def _begin_closing(self) -> None:
        self._closing = True
