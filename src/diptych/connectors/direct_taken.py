"""Decode's side of direct hand-offs: drives `handoff_decode` for each request.

Blocks are bits in the machine; here each announcement that brings more tokens is one bit, one range
of tokens and one read. The last range counts as read only once all is here and its checksums are
right, so that READ_DONE speaks of verified bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from diptych.connectors.base import HandedOver
from diptych.connectors.direct_attempt import ReadRange, Taken, TakenPrompt
from diptych.connectors.direct_deadlines import PULLING, TakenDeadlines
from diptych.connectors.direct_early import EarlyAnnouncements
from diptych.connectors.direct_messages import HandoffMessage
from diptych.connectors.direct_reports import Arrival, DirectReports
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_times import HandoffTimes, Pace
from diptych.connectors.handoff import ANNOUNCEMENTS, RULES, Event, State
from diptych.connectors.handoff_decode import step_decode
from diptych.connectors.handoff_machines import DECODE, PREFILL, Decode, Message
from diptych.connectors.kv_checksums import Checksums
from diptych.connectors.peer_reads import RangeRead, RangeResult
from diptych.connectors.plan import BlockTable
from diptych.connectors.transports.base import ReadState

_log = logging.getLogger(__name__)

_LISTENING = (*PULLING, State.VALIDATING)
_WAITING = (State.IDLE, State.OFFERED, State.DEFERRED)
_LOST = (State.ASKING, State.REFUSED)
# KV is here within a fraction of this after COMMIT; where it is slower, steps go on as ever
_ARRIVAL_S = 20e-3
# and within this over NVLink, until it is known how long it takes
_FIRST_ARRIVAL_S = 2.5e-3
# how much later than expected it is still awaited
_SLACK_S = 0.7e-3
# how long an announcement waits for its request
_EARLY_KEPT_S = 5.0
# an expected COMMIT is awaited from and until these shares of its time, and so much before or after
_EARLY, _LATE, _MARGIN_S = 0.8, 1.5, 5e-3


class RangeReads(Protocol):
    """What is needed of `peer_reads.PeerReads`."""

    def read(self, order: RangeRead) -> None: ...
    def cancel(self, read_id: str) -> None: ...


class TakenPrompts:
    """All hand-offs of a decode engine. One thread's."""

    def __init__(
        self,
        settings: DirectSettings,
        reports: DirectReports,
        send: Callable[[str, HandoffMessage], None],
        reads: RangeReads,
        monotonic: Callable[[], float],
        *,
        knows: Callable[[str], bool],
        granule: Callable[[str], int],
        source_block: Callable[[str], int],
        relink: Callable[[str], None] = lambda peer: None,
        checksums: Checksums | None = None,
        stores: bool = False,
    ) -> None:
        """
        Args:
            send: takes the peer first.
            knows: whether a peer is met: one that is not says nothing.
            granule: of a peer: tokens that a range of a prompt not yet committed is a multiple of,
                so that no block of either side is read in two parts.
            source_block: of a peer: tokens of its blocks, which its checksums are of; 0 where its
                checksums are not ours to compare.
            relink: connects a peer anew whose connection was lost.
            checksums: of this pool; None compares nothing.
            stores: whether KV that its source held for too long may be in a store.
        """
        self._settings = settings
        self._reports = reports
        self._send = send
        self._reads = reads
        self._monotonic = monotonic
        self._deadlines = TakenDeadlines(settings, knows)
        self._granule = granule
        self._source_block = source_block
        self._relink = relink
        self._checksums = checksums
        self._stores = stores
        self._taken: dict[str, Taken] = {}
        self._early = EarlyAnnouncements(monotonic, _EARLY_KEPT_S)
        self.times = HandoffTimes()
        # until COMMIT, then until all is read, then until the verdict
        self._pace = Pace()
        self._read_pace = Pace()
        self._verdict_pace = Pace()
        self.num_received = 0
        self.failures: Counter[str] = Counter()
        self.num_tokens = 0
        self.num_stored = 0
        self.num_corrupt = 0
        # events without a rule, by what they were
        self.ignored: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def use(self, reads: RangeReads) -> None:
        """Read by these, before the first request."""
        self._reads = reads

    # --- from the scheduler

    def offer(self, prompt: TakenPrompt) -> None:
        """The request waits for its KV from now on; nothing is reserved."""
        if prompt.request_id in self._taken:
            return
        entry = self._taken[prompt.request_id] = Taken(prompt, offered_s=self._monotonic())
        offer = Message(Event.OFFER, DECODE, prompt.epoch, prompt.num_given)
        self._step(entry, Event.OFFER, offer)
        if (early := self._early.take(prompt.peer, prompt.request_id)) is not None:
            self.take(prompt.peer, early)

    def reserved(self, request_id: str, local_tokens: int, block_ids: Sequence[int]) -> None:
        """The request has all its blocks; nothing reads or writes those past `local_tokens`."""
        entry = self._taken.get(request_id)
        if entry is None:
            return
        entry.block_ids, entry.local_tokens = list(block_ids), local_tokens
        entry.heard_s = entry.renew_at_s = self._monotonic()
        self._step(entry, Event.ROOM)

    def released(self, request_id: str) -> None:
        """The request has ended; `read_ended` is reported once nothing writes its blocks."""
        entry = self._taken.get(request_id)
        if entry is None:
            return
        entry.told = True
        self._step(entry, Event.RELEASE, Message(Event.RELEASE, DECODE, entry.machine.epoch))

    # --- from the peer

    def take(self, peer: str, message: HandoffMessage) -> None:
        """An announcement, STORED, REVOKE or a verdict. Of requests that are not known yet the last
        announcement is kept, of others that are unknown nothing."""
        entry = self._taken.get(message.request_id)
        if entry is None and message.kind in ANNOUNCEMENTS:
            self._early.keep(peer, message)
            return
        if entry is None or entry.prompt.peer != peer:
            self.ignored[f"{message.kind} of an unknown request"] += 1
            return
        if message.kind is Event.GONE and message.ended:
            return  # no failure: the router lets go of it here as well, or its deadline does
        if message.epoch == entry.machine.epoch:
            entry.heard_s = self._monotonic()
        if message.kind in ANNOUNCEMENTS:
            self._announced(entry, message)
            return
        if message.kind in (Event.REVOKE, Event.GONE):
            entry.why = f"the prefill worker said {message.kind}"
        if message.kind is Event.STORED and message.epoch == entry.machine.epoch:
            if message.token_id < 0 or message.num_cached_tokens > entry.prompt.num_tokens:
                self._refuse(entry)
                return
            entry.why = "the prefill worker gave up holding its KV"
            entry.stored = message
        inner = Message(message.kind, DECODE, message.epoch, message.number, start=message.start)
        self._step(entry, message.kind, inner)

    def peer_gone(self, peer: str, why: str) -> None:
        """That incarnation computes and holds nothing any more."""
        self._early.part(peer)
        for entry in list(self._taken.values()):
            if entry.prompt.peer == peer:
                entry.why = why
                self._step(entry, Event.PREFILL_RESTARTED)

    def read_ended(self, result: RangeResult) -> None:
        """What became of a range."""
        request_id, _, index = result.read_id.rpartition("/")
        entry = self._taken.get(request_id)
        if entry is None:
            return
        number = int(index)
        bit, part = 1 << number, entry.ranges[number]
        pulling = entry.machine.state in PULLING
        if result.state is not ReadState.DONE:
            entry.why = f"a read failed: {(result.failure or result.state).value} {result.detail}"
        part.ended = result.state is not ReadState.QUARANTINED
        if result.state is ReadState.DONE:
            part.here = True
            if pulling:
                self._sum(entry, part)
                self._arrived(entry, number)
            else:
                self._step(entry, Event.READ_ENDED, block=bit)
        elif pulling and part.ended and part.tries < self._settings.read_tries:
            _log.info("request %s is read again: %s", request_id, entry.why)
            self._relink(entry.prompt.peer)
            self._read(entry, number)
        elif pulling:
            event = Event.READ_FAILED if part.ended else Event.READ_DEADLINE
            self._step(entry, event, block=bit)
        elif part.ended:
            self._step(entry, Event.READ_ENDED, block=bit)

    # --- time

    def tick(self) -> None:
        """Deadlines, repetitions and renewals."""
        now = self._monotonic()
        if num_dropped := self._early.drop():
            self.ignored["announcement of an unknown request"] += num_dropped
        for entry in list(self._taken.values()):
            deadline = self._deadlines.of(entry)
            if deadline is not None and now >= deadline.at_s:
                entry.why = deadline.why
                self._step(entry, deadline.event)
                continue
            state = entry.machine.state
            if state is State.VALIDATING and now >= entry.repeat_at_s:
                entry.repeat_at_s = now + self._settings.repeat_s
                self._step(entry, Event.REPEAT)
            if state in _LISTENING and now >= entry.renew_at_s:
                entry.renew_at_s = now + self._deadlines.renew_s
                self._step(entry, Event.RENEW_DUE)

    def next_at_s(self) -> float | None:
        """When `tick` has something to do; None: never."""
        times = []
        for entry in self._taken.values():
            if (deadline := self._deadlines.of(entry)) is not None:
                times.append(deadline.at_s)
            if entry.machine.state in _LISTENING:
                times.append(entry.renew_at_s)
            if entry.machine.state is State.VALIDATING:
                times.append(entry.repeat_at_s)
        return min(times, default=None)

    # --- inside

    def _announced(self, entry: Taken, message: HandoffMessage) -> None:
        fresh = message.epoch == entry.machine.epoch and message.number > entry.machine.number
        if fresh and not self._note(entry, message):
            self._refuse(entry)
            return
        inner = Message(
            message.kind,
            DECODE,
            message.epoch,
            message.number,
            blocks=entry.all_bits,
            start=message.start,
        )
        if entry.machine.state is State.OFFERED:
            # nothing is reserved here: the scheduler is asked, and says when there is room
            self._step(entry, Event.NO_ROOM, inner)
        else:
            self._step(entry, message.kind, inner)

    def _refuse(self, entry: Taken) -> None:
        """What prefill says is not of this prompt: nothing of it is used."""
        entry.why = "prefill announced what is not this prompt"
        self._step(entry, Event.PREFILL_RESTARTED)

    def _note(self, entry: Taken, message: HandoffMessage) -> bool:
        """Remember what an announcement brings; False where it cannot be of this prompt."""
        commits = message.kind is Event.COMMIT
        end = message.num_tokens
        is_wrong = end > entry.prompt.num_tokens
        if commits:
            is_wrong = end != entry.prompt.num_tokens or message.token_id < 0
            is_wrong |= message.num_cached_tokens > end
        if is_wrong or entry.committed is not None:
            return not is_wrong
        if not commits:
            end -= end % self._granule(entry.prompt.peer)
        entry.latest = message
        if commits:
            entry.committed = message
            entry.committed_s = self._monotonic()
            if entry.announced_s:
                self.times.add("begun to commit", entry.committed_s - entry.announced_s)
                self._pace.note(end, entry.committed_s - entry.announced_s)
        if end > entry.known_tokens or commits:
            entry.ranges.append(ReadRange(entry.known_tokens, end))
        if commits:
            entry.num_unread = entry.num_on_the_way
        return True

    def _step(
        self, entry: Taken, event: Event, message: Message | None = None, *, block: int = 0
    ) -> None:
        before = entry.machine
        outcome = step_decode(RULES, entry.shape, before, event, message, block)
        assert isinstance(outcome.machine, Decode)
        entry.machine = outcome.machine
        if outcome.counted:
            self.ignored[f"{event} in {before.state}"] += outcome.counted
        for out in outcome.messages:
            if out.target == PREFILL:
                self._tell(entry, out)
        if entry.machine.state is State.VALIDATING and before.state is not State.VALIDATING:
            entry.validating_s = self._monotonic()
            read_s = entry.validating_s - entry.committed_s
            self.times.add("commit to all read", read_s)
            self._read_pace.note(entry.num_unread, read_s)
            entry.repeat_at_s = entry.validating_s + self._settings.repeat_s
            # READ_DONE is a sign of life as well
            entry.renew_at_s = entry.validating_s + self._deadlines.renew_s
        if entry.machine.state is State.DEFERRED and before.state is State.OFFERED:
            entry.announced_s = self._monotonic()
            self._reports.announced(entry.prompt.request_id)
        self._post(entry)
        self._lift(entry)
        self._settle(entry)
        self._reports.expect(entry.prompt.request_id, self._arrival(entry))

    def _arrival(self, entry: Taken) -> Arrival | None:
        """When its KV may be here; None where nobody knows."""
        if entry.machine.state not in _LISTENING:
            return None
        if entry.committed is not None:
            at_s = entry.committed_s
            ready_s = at_s + (self._arrival_s(entry) or _FIRST_ARRIVAL_S)
            return Arrival(at_s, at_s + _ARRIVAL_S, ready_s, ready_s + _SLACK_S)
        expected_s = self._pace.expected_s(entry.prompt.num_tokens)
        if not expected_s or not entry.announced_s:
            return None
        return Arrival(
            entry.announced_s + _EARLY * expected_s - _MARGIN_S,
            entry.announced_s + _LATE * expected_s + _MARGIN_S,
        )

    def _arrival_s(self, entry: Taken) -> float:
        """From COMMIT until its KV is here and valid, going by others before; 0: nobody knows."""
        read_s = self._read_pace.expected_s(entry.num_unread)
        return read_s + self._verdict_pace.expected_s(1) if read_s else 0.0

    def _tell(self, entry: Taken, out: Message) -> None:
        wire = HandoffMessage(
            kind=out.kind,
            request_id=entry.prompt.request_id,
            epoch=out.epoch,
            number=out.number,
            num_tokens=entry.num_to_read if out.kind is Event.READ_DONE else 0,
            verifies=self._checksums is not None and self._source_block(entry.prompt.peer) > 0,
        )
        self._send(entry.prompt.peer, wire)

    def _post(self, entry: Taken) -> None:
        """Begin the reads that the machine has as begun."""
        if entry.machine.state not in PULLING or entry.latest is None:
            return
        for number, part in enumerate(entry.ranges):
            if part.posted or not entry.machine.reading >> number & 1:
                continue
            part.posted = True
            if max(part.start, entry.local_tokens) >= part.end:
                part.here = part.ended = True
                self._arrived(entry, number)
            else:
                self._read(entry, number)

    def _read(self, entry: Taken, number: int) -> None:
        """Order the read of a range; the machine has it as under way, the first time or again."""
        assert entry.latest is not None
        part = entry.ranges[number]
        part.tries += 1
        part.ended = False
        entry.num_reads += 1
        self._reads.read(
            RangeRead(
                read_id=f"{entry.prompt.request_id}/{number}",
                incarnation=entry.prompt.peer,
                source_blocks=BlockTable.of(entry.latest.block_ids),
                target_blocks=BlockTable.of(entry.block_ids),
                start_token=max(part.start, entry.local_tokens),
                end_token=part.end,
                deadline_s=self._monotonic() + self._settings.read_s,
            )
        )

    def _arrived(self, entry: Taken, number: int) -> None:
        """A range is here; the last of all counts once all are, and are right."""
        if entry.committed is None or number != len(entry.ranges) - 1:
            self._step(entry, Event.READ_OK, block=1 << number)
        if entry.machine.state not in PULLING or entry.committed is None:
            return
        last = len(entry.ranges) - 1
        if not all(part.here for part in entry.ranges) or entry.machine.have >> last & 1:
            return
        if self._is_right(entry, entry.committed):
            self._step(entry, Event.READ_OK, block=1 << last)
        else:
            self.num_corrupt += 1
            self._reports.corrupt()
            entry.why = "a checksum is wrong"
            _log.error("request %s: KV arrived with wrong checksums", entry.prompt.request_id)
            self._step(entry, Event.READ_FAILED, block=1 << last)

    def _sum(self, entry: Taken, part: ReadRange) -> None:
        """Checksums of what arrived, while the rest is under way."""
        size = self._source_block(entry.prompt.peer)
        if self._checksums is None or not size:
            return
        part.first_block = -(-max(part.start, entry.local_tokens) // size)
        start = part.first_block * size
        if start < part.end:
            part.checksums = self._checksums.begin(entry.block_ids, start, part.end, size)

    def _is_right(self, entry: Taken, commit: HandoffMessage) -> bool:
        """Whether what arrived is what prefill had; True where either side does not verify."""
        for part in entry.ranges if commit.checksums else ():
            if part.checksums is None:
                continue
            ours, first = part.checksums(), part.first_block
            if commit.checksums[first : first + len(ours)] != ours:
                return False
        return True

    def _lift(self, entry: Taken) -> None:
        """Cancel reads that were given up; those that ended already are in quarantine no more."""
        for number, part in enumerate(entry.ranges):
            if not entry.machine.quarantine >> number & 1:
                continue
            if part.ended or not part.posted:
                self._step(entry, Event.READ_ENDED, block=1 << number)
            elif not part.cancelled:
                part.cancelled = True
                self._reads.cancel(f"{entry.prompt.request_id}/{number}")

    def _settle(self, entry: Taken) -> None:
        """Tell the scheduler what it must know, and forget what is over."""
        request_id, state = entry.prompt.request_id, entry.machine.state
        if self._taken.get(request_id) is not entry:
            return
        if state is State.STORE_READING and entry.stored is not None:
            self._leave_to_store(entry, entry.stored)
            return
        if state is State.DECODING and entry.committed is not None:
            del self._taken[request_id]
            self.num_received += 1
            verdict_s = self._monotonic() - entry.validating_s
            self.times.add("all read to valid", verdict_s)
            self._verdict_pace.note(1, verdict_s)
            self.num_tokens += entry.num_to_read
            self._reports.forget(request_id)
            commit = entry.committed
            self._reports.received(
                request_id, HandedOver(commit.token_id, commit.num_cached_tokens)
            )
        elif state in _LOST and not entry.told:
            entry.told = True
            why = entry.why or "it was refused"
            self.failures[why.partition(":")[0]] += 1  # without what varies
            _log.warning("hand-off of request %s failed: %s", request_id, why)
            self._reports.failed(request_id, why)
        elif state is State.RELEASED:
            del self._taken[request_id]
            self._reports.read_ended(request_id)

    def _leave_to_store(self, entry: Taken, stored: HandoffMessage) -> None:
        """The store is read for the scheduler's request itself, and what is not there computed;
        that begins once nothing writes the blocks that it has now."""
        if not self._stores:
            self._step(entry, Event.STORE_READ_FAILED)
        elif not entry.machine.quarantine:
            request_id = entry.prompt.request_id
            del self._taken[request_id]
            self.num_stored += 1
            self._reports.left_to_store(
                request_id, HandedOver(stored.token_id, stored.num_cached_tokens)
            )
