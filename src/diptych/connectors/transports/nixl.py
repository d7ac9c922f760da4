"""NIXL over UCX: cuda_ipc between GPUs of a host, RDMA between hosts, else shared memory or TCP.

What was measured of NIXL 1.5.1 and shapes this file (docs/decisions/0007):

- Releasing a transfer, or removing the remote agent, does *not* stop the writes of a read that is
  under way over emulated RMA (tcp): bytes arrived after both. Only the end of the transfer itself,
  or of the whole local agent, proves that the target is written no more. So a failed read stays
  QUARANTINED, nothing is released before it ended, and a read that never ends takes the agent
  with it after `quarantine_s`.
- The agent's progress thread spins on a core. It stays off; `progress` and `poll` do its work.
- A peer that died makes the state call raise; its other reads end by themselves.
- One agent is one thread's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Memory,
    Offer,
    Peer,
    ReadFailure,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.choose import has_rdma
from diptych.connectors.transports.nixl_lists import DescriptorLists, Region
from diptych.errors import ConfigError, TransferError

_log = logging.getLogger(__name__)

# a read is looked at ever more rarely, at most a sixteenth later than it ended: 4k tokens take 1.4
# ms over NVLink, and what is seen late is bandwidth that is lost
_MIN_TICK_S = 30e-6
_MAX_TICK_S = 1e-3
_LATENESS = 16
_IDLE_TICK_S = 2e-3
PACKAGES = ("nixl_cu13", "nixl_cu12")


class _Payload(msgspec.Struct, frozen=True):
    """A NIXL offer: the agent, and where the regions lie in its process."""

    version: str
    metadata: bytes
    regions: dict[str, Region]


class NixlPeer(Peer):
    """A remote agent."""

    def __init__(self, endpoint: Endpoint, agent: str, regions: Mapping[str, Region]) -> None:
        super().__init__(endpoint)
        self.agent = agent
        self.regions = regions
        self.closing = False


class _NixlRead(ReadHandle):
    """A read and its transfer, which is kept until it ended."""

    __slots__ = ("failed_s", "posted_s", "transfer")
    transfer: Any
    posted_s: float
    failed_s: float


class NixlTransport(Transport):
    """Reads by NIXL.

    Args:
        quarantine_s: a read that failed here but goes on in NIXL for so long ends the agent, and
            with it all reads of this transport; peers are connected anew.
    """

    name = "nixl"

    def __init__(self, *, quarantine_s: float = 60.0) -> None:
        self._api, self.version = load_nixl()
        self._quarantine_s = quarantine_s
        self._memories: dict[str, Memory] = {}
        self._regions: dict[str, Region] = {}
        self._reads: set[_NixlRead] = set()
        self._peers: set[NixlPeer] = set()
        self._offered = False
        self._agent: Any = None
        self._lists: DescriptorLists | None = None
        self._closed = False
        self._open_agent()

    def register(self, region: str, memory: Memory) -> None:
        kind, _, index = memory.device.partition(":")
        entry = Region(
            memory.address, memory.num_bytes, "VRAM" if index else "DRAM", int(index or 0)
        )
        if kind not in ("cpu", "cuda"):
            raise TransferError(f"NIXL does not reach memory on {memory.device}")
        self._register(entry)
        self._memories[region] = memory
        self._regions[region] = entry

    def offer(self) -> Offer:
        self._offered = True
        payload = _Payload(self.version, self._agent.get_agent_metadata(), self._regions)
        return Offer(transport=self.name, payload=msgspec.msgpack.encode(payload))

    def connect(self, endpoint: Endpoint) -> NixlPeer:
        offer = endpoint.offer(self.name)
        if offer is None:
            raise TransferError("the peer does not run NIXL")
        try:
            payload = msgspec.msgpack.decode(offer.payload, type=_Payload)
        except (ValueError, RecursionError) as error:
            raise TransferError(f"a peer's NIXL offer cannot be read: {error}") from error
        if payload.version != self.version:
            raise TransferError(f"the peer runs NIXL {payload.version}, this worker {self.version}")
        try:
            agent = self._agent.add_remote_agent(payload.metadata)
        except Exception as error:
            raise TransferError(f"NIXL refused the peer: {error}") from error
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        peer = NixlPeer(endpoint, name, payload.regions)
        self._peers.add(peer)
        return peer

    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        assert isinstance(peer, NixlPeer)
        handle = _NixlRead(peer, runs.num_bytes, len(runs), deadline_s)
        handle.transfer, handle.posted_s, handle.failed_s = None, time.monotonic(), 0.0
        theirs, ours = peer.regions.get(region), self._regions[into]
        if not handle.admit(runs, 0 if theirs is None else theirs.num_bytes, ours.num_bytes):
            return handle
        if peer.gone or theirs is None or self._lists is None:
            handle.fail(ReadFailure.PEER_GONE)
        elif not len(runs):
            handle.state = ReadState.DONE
        else:
            self._post(handle, peer, theirs, ours, runs)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        assert isinstance(handle, _NixlRead)
        if handle.transfer is not None:
            self._see(handle, lambda: self._agent.check_xfer_state(handle.transfer))
        if not handle.ended and time.monotonic() >= handle.deadline_s:
            self._give_up(handle, ReadFailure.DEADLINE)
        return handle.state

    def cancel(self, handle: ReadHandle) -> None:
        assert isinstance(handle, _NixlRead)
        if handle.transfer is not None:
            self._see(handle, lambda: self._agent.check_xfer_state(handle.transfer))
        self._give_up(handle, ReadFailure.CANCELLED)

    def fence(self, peer: Peer) -> bool:
        for read in [read for read in self._reads if read.peer is peer]:
            self.poll(read)
        return not any(read.peer is peer for read in self._reads)

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, NixlPeer)
        peer.gone = peer.closing = True
        for read in [read for read in self._reads if read.peer is peer]:
            self.cancel(read)
        self._forget(peer)

    def progress(self) -> None:
        if self._agent is None:
            return
        if self._offered or self._peers:
            # notifications are not used; asking for them is what makes UCX go on
            self._agent.get_new_notifs()
        for peer in [peer for peer in self._peers if peer.closing]:
            if self.fence(peer):
                self._forget(peer)
        now = time.monotonic()
        if any(read.failure and now - read.failed_s > self._quarantine_s for read in self._reads):
            self._retire_agent()

    def tick_s(self) -> float | None:
        if self._reads:
            youngest_s = time.monotonic() - max(read.posted_s for read in self._reads)
            return min(max(youngest_s / _LATENESS, _MIN_TICK_S), _MAX_TICK_S)
        return _IDLE_TICK_S if self._offered or self._peers else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for read in list(self._reads):
            self.cancel(read)
        if self._reads:
            self._drop_agent(ReadFailure.CLOSED)
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        self._drop_agent(ReadFailure.CLOSED)

    # --- reads

    def _post(
        self, handle: _NixlRead, peer: NixlPeer, theirs: Region, ours: Region, runs: Runs
    ) -> None:
        assert self._lists is not None
        try:
            handle.transfer = self._lists.make_read(peer.agent, theirs, ours, runs)
        except Exception as error:
            handle.fail(ReadFailure.BACKEND, str(error))
            return
        self._reads.add(handle)
        self._see(handle, lambda: self._agent.transfer(handle.transfer))

    def _see(self, handle: _NixlRead, ask: Any) -> None:
        """Take what NIXL says of a transfer; one that ended is released."""
        try:
            state = ask()
        except self._api.disconnect_errors as error:
            handle.peer.gone = True
            self._ended(handle, ReadFailure.PEER_GONE, str(error))
        except self._api.errors as error:
            handle.peer.gone = True
            self._ended(handle, ReadFailure.BACKEND, str(error))
        else:
            if state == "DONE":
                self._ended(handle, None)
            elif state != "PROC":
                handle.peer.gone = True
                self._ended(handle, ReadFailure.BACKEND, f"NIXL says {state}")

    def _ended(self, handle: _NixlRead, failure: ReadFailure | None, detail: str = "") -> None:
        self._reads.discard(handle)
        if handle.failure is not None or failure is not None:
            handle.fail(failure or ReadFailure.CANCELLED, detail)
        else:
            handle.state = ReadState.DONE
        transfer, handle.transfer = handle.transfer, None
        try:
            self._agent.release_xfer_handle(transfer)
        except Exception as error:
            _log.warning("NIXL keeps a transfer that ended: %s", error)

    def _give_up(self, handle: _NixlRead, failure: ReadFailure) -> None:
        if handle.ended or handle.state is ReadState.QUARANTINED:
            return
        handle.fail(failure, quarantine=handle.transfer is not None)
        handle.failed_s = time.monotonic()

    def _forget(self, peer: NixlPeer) -> None:
        """Let a peer's memory go, which must not happen before its reads ended."""
        if peer not in self._peers or any(read.peer is peer for read in self._reads):
            return
        self._peers.discard(peer)
        assert self._lists is not None
        self._lists.forget(peer.agent)
        try:
            self._agent.remove_remote_agent(peer.agent)
        except Exception as error:
            _log.info("NIXL knew nothing of a peer that went: %s", error)

    # --- the agent

    def _open_agent(self) -> None:
        config = self._api.config(enable_prog_thread=False, backends=["UCX"])
        try:
            # a name is never used twice: the remote side must not take us for an older agent
            self._agent = self._api.agent(f"diptych-{uuid.uuid4().hex}", config)
        except Exception as error:
            raise TransferError(f"NIXL cannot start its UCX backend: {error}") from error
        self._lists = DescriptorLists(self._agent)

    def _register(self, entry: Region) -> None:
        rows = [(entry.address, entry.num_bytes, entry.device_id, "")]
        try:
            self._agent.register_memory(rows, entry.kind)
        except Exception as error:
            raise TransferError(f"NIXL cannot register {entry.kind} memory: {error}") from error

    def _retire_agent(self) -> None:
        """End the agent, the only proof left that nothing is written any more, and start anew."""
        _log.warning("reads do not end: the NIXL agent is replaced and its peers are let go")
        self._drop_agent(ReadFailure.BACKEND)
        self._open_agent()
        for entry in self._regions.values():
            self._register(entry)

    def _drop_agent(self, failure: ReadFailure) -> None:
        agent, self._agent = self._agent, None
        lists, self._lists = self._lists, None
        if lists is not None:
            lists.abandon()
        for read in self._reads:
            if read.transfer is not None:
                # the agent's own end cancels it; a release now would only forget it
                read.transfer._released = True
                read.transfer = None
        for peer in self._peers:
            peer.gone = True
        self._peers.clear()
        if agent is not None:
            agent.agent = None
        del agent
        for read in self._reads:
            read.fail(failure, "the agent was ended")
        self._reads.clear()


class _Api:
    """What is used of the NIXL package that is installed."""

    def __init__(self, package: str) -> None:
        api: Any = importlib.import_module(f"{package}._api")
        bindings: Any = importlib.import_module(f"{package}._bindings")
        self.agent: Any = api.nixl_agent
        self.config: Any = api.nixl_agent_config
        self.errors: tuple[type[BaseException], ...] = (Exception,)
        self.disconnect_errors: tuple[type[BaseException], ...] = (
            bindings.nixlRemoteDisconnectError,
        )


def installed() -> str | None:
    """The NIXL package for this process's torch, `nixl_cu13` or `nixl_cu12`; None without one."""
    found = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    if len(found) < 2:
        return found[0] if found else None
    import torch

    return "nixl_cu12" if (torch.version.cuda or "").startswith("12") else "nixl_cu13"


def load_nixl() -> tuple[_Api, str]:
    """The API and its version.

    Raises:
        TransferError: NIXL is not installed.
        ConfigError: UCX is told to do without TCP, with which it cannot connect at all.
    """
    package = installed()
    if package is None:
        raise TransferError("NIXL is not installed: pip install 'diptych[cu13]' or 'diptych[cu12]'")
    check_ucx_tls(os.environ)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if not has_rdma():
        # UCX would load the system's libibverbs, whose libnl and NIXL's own end the process with
        # SIGSEGV when it exits (NIXL 1.5.1 beside Debian's libibverbs1)
        os.environ.setdefault("UCX_MODULES", "^ib")
    return _Api(package), importlib.metadata.version(package.replace("_", "-"))


def check_ucx_tls(environment: Mapping[str, str]) -> None:
    """Refuse a UCX_TLS without tcp.

    Raises:
        ConfigError: as it says.
    """
    allowed = environment.get("UCX_TLS", "")
    names = [name.strip() for name in allowed.lstrip("^").split(",") if name.strip()]
    if not names:
        return
    lacks = "tcp" in names if allowed.startswith("^") else not {"tcp", "all"} & set(names)
    if lacks:
        raise ConfigError(
            f"UCX_TLS={allowed} leaves tcp out, which UCX needs to connect peers; add tcp",
            param="UCX_TLS",
        )
