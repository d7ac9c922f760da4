"""Prefill's side of direct hand-offs: drives `handoff_prefill` for each request.

It announces what was computed, holds it until its reader has confirmed, and never waits. Its blocks
go back to the scheduler only through here once the prompt is done, so that VALID is never said of
blocks that were given away.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.connectors.direct_messages import HandoffMessage
from diptych.connectors.direct_reports import DirectReports
from diptych.connectors.direct_settings import NAME, DirectSettings
from diptych.connectors.handoff import ANNOUNCEMENTS, RULES, Event, State
from diptych.connectors.handoff_machines import DECODE, PREFILL, Message, Prefill, Shape
from diptych.connectors.handoff_prefill import step_prefill
from diptych.connectors.kv_checksums import Checksums, PendingChecksums
from diptych.connectors.store_settings import NAME as STORE_NAME
from diptych.engine.request import KVCommit

_log = logging.getLogger(__name__)

MAX_KEPT = 8192
# A tail that takes longer to be stored is computed by its reader.
_STORING_S = 10.0
_NO_EPOCHS = 1 << 30
_LEASED = (State.PREFILLING, State.HOLDING)
_REPEATING = (*_LEASED, State.STORED)
_OVER = (State.FREED, State.STORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """One request whose KV a peer will read. `num_given` tokens of output came with it."""

    request_id: str
    epoch: int
    peer: str
    kv_namespace: str
    num_given: int = 0


@dataclass(slots=True, eq=False)
class _Given:
    """One hand-off on prefill's side. `committed` is the number of its last announcement, once it
    is known; `num_read` are the tokens that the reader says it has read; `owed` whether the
    scheduler waits to have the blocks back; `ended` whether the request ended before the KV was
    read or given up; `leaving_since_s` when the store was to be given the rest of it, and `storing`
    whether blocks may still be copied for that."""

    prompt: GivenPrompt
    machine: Prefill = field(default_factory=Prefill)
    committed: int = 0
    num_tokens: int = 0
    num_read: int = 0
    block_ids: list[int] = field(default_factory=list)
    token_id: int = -1
    num_cached_tokens: int = 0
    pending: list[PendingChecksums] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    owed: bool = False
    ended: bool = False
    last: HandoffMessage | None = None
    repeat_at_s: float = 0.0
    lease_end_s: float = 0.0
    held_since_s: float = 0.0
    leaving_since_s: float | None = None
    storing: bool = False
    forget_at_s: float | None = None

    @property
    def is_leased(self) -> bool:
        """Whether its blocks are held for the reader, for as long as that is heard of."""
        return self.machine.state in _LEASED and not self.machine.lapsed

    @property
    def shape(self) -> Shape:
        """As far as it is known; blocks are the reader's to count."""
        return Shape((0,) * (self.committed or self.machine.number + 2), 0, 0, _NO_EPOCHS)


class GivenPrompts:
    """All hand-offs of a prefill engine. One thread's."""

    def __init__(
        self,
        settings: DirectSettings,
        reports: DirectReports,
        send: Callable[[str, HandoffMessage], None],
        monotonic: Callable[[], float],
        *,
        block_size: int,
        checksums: Checksums | None = None,
        stores: bool = False,
    ) -> None:
        """`send` takes the peer first; without `checksums` none are given. With `stores` the pages
        of what was computed go to a store as well, and the tail when it is asked for."""
        self._settings = settings
        self._reports = reports
        self._send = send
        self._monotonic = monotonic
        self._block_size = block_size
        self._checksums = checksums
        self._stores = stores
        self._given: dict[str, _Given] = {}
        self._unverifying: set[str] = set()
        self.num_valid = 0
        self.num_gone = 0
        self.num_tokens = 0
        self.num_stored = 0
        # events without a rule, by what they were
        self.ignored: Counter[str] = Counter()

    # --- from the scheduler

    def begin(self, prompt: GivenPrompt) -> None:
        """Its first chunk is about to be computed."""
        entry = self._given.get(prompt.request_id)
        if entry is not None:
            return
        entry = self._given[prompt.request_id] = _Given(prompt)
        entry.lease_end_s = self._monotonic() + self._settings.lease_s
        ticket = Message(Event.TICKET, PREFILL, prompt.epoch, prompt.num_given)
        self._step(entry, Event.TICKET, ticket)
        self._step(entry, Event.STEP)

    def computed(self, request_id: str, num_tokens: int, block_ids: Sequence[int]) -> None:
        """A chunk's KV is in the cache; the prompt goes on."""
        entry = self._given.get(request_id)
        whole = num_tokens - num_tokens % self._block_size
        if entry is None or entry.machine.state is not State.PREFILLING:
            return
        if whole <= entry.num_tokens:
            return
        self._extend(entry, whole, block_ids)
        self._step(entry, Event.STEP)

    def done(
        self,
        request_id: str,
        num_tokens: int,
        block_ids: Sequence[int],
        token_id: int,
        num_cached_tokens: int,
    ) -> None:
        """All is computed and the next token sampled; the blocks stay until they are reported."""
        entry = self._given.get(request_id)
        if entry is None:
            self._reports.sent(request_id, None)
            return
        entry.owed = True
        if entry.machine.state is State.PREFILLING:
            self._extend(entry, num_tokens, block_ids)
            entry.token_id, entry.num_cached_tokens = token_id, max(0, num_cached_tokens)
            entry.committed = entry.machine.number + 1
            entry.held_since_s = self._monotonic()
            if self._is_unwanted(entry):
                self._leave(entry)
            else:
                self._step(entry, Event.STEP)
        self._settle(entry)

    def preempted(self, request_id: str) -> None:
        """Its blocks are gone; what was announced is not to be read."""
        if entry := self._given.get(request_id):
            self._step(entry, Event.PREEMPT)

    def released(self, request_id: str) -> None:
        """The request has ended: explicitly, or because what it sampled ended it."""
        if entry := self._given.get(request_id):
            entry.ended |= entry.machine.state not in _OVER
            release = Message(Event.RELEASE, PREFILL, entry.machine.epoch)
            self._step(entry, Event.RELEASE, release)

    # --- from peers

    def take(self, peer: str, message: HandoffMessage) -> None:
        """An ACK, RENEW or READ_DONE."""
        entry = self._given.get(message.request_id)
        if entry is None or entry.prompt.peer != peer:
            self._answer_unknown(peer, message)
            return
        if message.verifies:
            self._unverifying.discard(peer)
        else:
            self._unverifying.add(peer)
        if message.kind is Event.READ_DONE:
            entry.num_read = min(message.num_tokens, entry.num_tokens)
        inner = Message(message.kind, PREFILL, message.epoch, message.number)
        self._step(entry, message.kind, inner)
        if message.kind is not Event.RENEW or message.epoch != entry.machine.epoch:
            return
        if entry.is_leased:
            entry.lease_end_s = self._monotonic() + self._settings.lease_s
            if entry.last is not None:
                self._send(peer, entry.last)  # the reader's proof that somebody is here

    def peer_gone(self, peer: str) -> None:
        """That incarnation reads no more: what is held for it is held for nobody, and a request
        that is sent anew finds its prefix in the cache."""
        self._unverifying.discard(peer)
        for entry in list(self._given.values()):
            if entry.prompt.peer == peer:
                self._step(entry, Event.DECODE_RESTARTED)
                self._step(entry, Event.LEASE_END)

    # --- time

    def tick(self) -> None:
        """Repeat what was not confirmed, end leases, forget."""
        now = self._monotonic()
        for request_id in self._reports.take_left():
            if entry := self._given.get(request_id):
                entry.storing = False
                self._settle(entry)
        for entry in list(self._given.values()):
            if entry.is_leased and now >= entry.lease_end_s:
                _log.info("request %s: its reader was silent too long", entry.prompt.request_id)
                self._step(entry, Event.LEASE_END)
            if self._is_unwanted(entry) and now >= self._leaves_at_s(entry):
                self._leave(entry)
            if entry.machine.state in _REPEATING and now >= entry.repeat_at_s:
                entry.repeat_at_s = now + self._settings.repeat_s
                self._step(entry, Event.REPEAT)
            if entry.forget_at_s is not None and now >= entry.forget_at_s and not entry.storing:
                del self._given[entry.prompt.request_id]

    def next_at_s(self) -> float | None:
        """When `tick` has something to do; None: never."""
        times = []
        for entry in self._given.values():
            if entry.machine.state in _REPEATING:
                times.append(entry.repeat_at_s)
            if entry.is_leased:
                times.append(entry.lease_end_s)
            if self._is_unwanted(entry):
                times.append(self._leaves_at_s(entry))
            if entry.forget_at_s is not None and not entry.storing:
                times.append(entry.forget_at_s)
        return min(times, default=None)

    @property
    def num_held(self) -> int:
        """Hand-offs whose blocks the scheduler waits for."""
        return sum(entry.owed for entry in self._given.values())

    # --- inside

    def _is_unwanted(self, entry: _Given) -> bool:
        """Whether all is computed and a store has it as well, and nobody has room for it, or was
        heard of while it was computed."""
        machine = entry.machine
        if machine.state is State.PREFILLING:
            return self._stores and machine.lapsed and entry.committed > 0
        return self._stores and machine.state is State.HOLDING and not machine.acked

    def _leaves_at_s(self, entry: _Given) -> float:
        """When it is left to the store, or what that has not got yet is to go there."""
        if entry.leaving_since_s is None:
            return entry.held_since_s + self._settings.hold_s
        if not entry.storing:
            return entry.leaving_since_s
        most_s = entry.leaving_since_s + _STORING_S
        if entry.machine.lapsed:
            return most_s
        return min(most_s, (entry.leaving_since_s + entry.lease_end_s) / 2)  # to be heard of

    def _leave(self, entry: _Given) -> None:
        """First the tail is stored, behind the pages that are on their way; the reader is sent
        there when it is, or that takes too long."""
        request_id = entry.prompt.request_id
        if entry.leaving_since_s is None:
            _log.info("request %s: no reader has room for it", request_id)
            entry.leaving_since_s, entry.storing = self._monotonic(), True
            self._reports.leave(request_id)
        elif entry.machine.state is State.HOLDING:
            self._step(entry, Event.RESERVE_DEADLINE)
        else:
            self._step(entry, Event.STEP)

    def _extend(self, entry: _Given, num_tokens: int, block_ids: Sequence[int]) -> None:
        """Its KV is in the cache up to here: a whole number of blocks but at the end."""
        size, start = self._block_size, entry.num_tokens
        entry.block_ids = list(block_ids[: -(-num_tokens // size)])
        # those that decode would not look at would only make COMMIT later
        wanted = entry.prompt.peer not in self._unverifying
        if self._checksums is not None and wanted and num_tokens > start:
            sums = self._checksums.begin(entry.block_ids, start, num_tokens, size)
            entry.pending.append(sums)
        entry.num_tokens = num_tokens

    def _step(self, entry: _Given, event: Event, message: Message | None = None) -> None:
        before = entry.machine
        outcome = step_prefill(RULES, entry.shape, before, event, message)
        assert isinstance(outcome.machine, Prefill)
        entry.machine = outcome.machine
        if outcome.counted:
            self.ignored[f"{event} in {before.state}"] += outcome.counted
        for out in outcome.messages:
            if out.target == DECODE:
                self._tell(entry, out)
        self._settle(entry)

    def _tell(self, entry: _Given, out: Message) -> None:
        request_id = entry.prompt.request_id
        entry.repeat_at_s = self._monotonic() + self._settings.repeat_s
        if out.kind not in ANNOUNCEMENTS:
            stored = out.kind is Event.STORED
            wire = HandoffMessage(
                kind=out.kind,
                request_id=request_id,
                epoch=out.epoch,
                number=out.number,
                start=out.start,
                token_id=entry.token_id if stored else -1,
                num_cached_tokens=entry.num_cached_tokens if stored else 0,
                ended=entry.ended and out.kind is Event.GONE,
            )
            self._send(entry.prompt.peer, wire)
            return
        commits = out.kind is Event.COMMIT
        if commits:
            for sums in entry.pending:
                entry.checksums += sums()
            entry.pending.clear()
        entry.last = HandoffMessage(
            kind=out.kind,
            request_id=request_id,
            epoch=out.epoch,
            number=out.number,
            start=out.start,
            num_tokens=entry.num_tokens,
            block_ids=entry.block_ids,
            token_id=entry.token_id if commits else -1,
            num_cached_tokens=entry.num_cached_tokens if commits else 0,
            checksums=entry.checksums if commits and self._all_summed(entry) else [],
        )
        self._send(entry.prompt.peer, entry.last)

    def _all_summed(self, entry: _Given) -> bool:
        """Not where the reader changed its mind while the prompt was computed."""
        return len(entry.checksums) == len(entry.block_ids)

    def _settle(self, entry: _Given) -> None:
        """Give the blocks back once the machine holds them no more."""
        if entry.machine.state not in _OVER:
            return
        valid = entry.machine.verdict is Event.VALID
        stored = entry.machine.state is State.STORED and self._stores
        if entry.forget_at_s is None:
            entry.forget_at_s = self._monotonic() + 2 * self._settings.verdict_s
            entry.last = None
            self.num_valid += valid
            self.num_stored += stored
            self.num_gone += not valid and not stored
            self.num_tokens += entry.num_read if valid else 0
        if entry.owed and not entry.storing:
            entry.owed = False
            connector = STORE_NAME if stored else NAME
            commit = _commit(entry, connector) if valid or stored else None
            self._reports.sent(entry.prompt.request_id, commit)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Verdicts are kept for a while, but not without bound: an unknown request's is GONE."""
        if len(self._given) <= MAX_KEPT:
            return
        for request_id, entry in list(self._given.items()):
            if entry.forget_at_s is not None and not entry.owed:
                del self._given[request_id]
                return

    def _answer_unknown(self, peer: str, message: HandoffMessage) -> None:
        self.ignored[f"{message.kind} of an unknown request"] += 1
        if message.kind in (Event.READ_DONE, Event.RENEW):
            gone = HandoffMessage(
                kind=Event.GONE, request_id=message.request_id, epoch=message.epoch
            )
            self._send(peer, gone)


def _commit(entry: _Given, connector: str) -> KVCommit:
    return KVCommit(
        epoch=entry.prompt.epoch,
        kv_namespace=entry.prompt.kv_namespace,
        num_tokens=entry.num_tokens,
        objects=[],
        connector=connector,
        num_cached_tokens=entry.num_cached_tokens,
    )
