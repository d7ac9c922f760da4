"""One direct hand-off as decode keeps it: a value of its machine, and what that leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.connectors.direct_messages import HandoffMessage
from diptych.connectors.handoff_machines import Decode, Shape
from diptych.connectors.kv_checksums import PendingChecksums

NO_END = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPrompt:
    """One request whose KV is read from a peer: `num_tokens` of prompt and output so far."""

    request_id: str
    epoch: int
    peer: str
    num_tokens: int
    ttl_s: float
    num_given: int = 0


@dataclass(slots=True, eq=False)
class ReadRange:
    """Tokens that one announcement brought. `here` once all of it has arrived, with checksums of
    prefill's blocks in it that were read, from `first_block` on; `ended` once nothing writes for it
    any more."""

    start: int
    end: int
    tries: int = 0
    posted: bool = False
    cancelled: bool = False
    here: bool = False
    ended: bool = False
    first_block: int = 0
    checksums: PendingChecksums | None = None


@dataclass(slots=True, eq=False)
class Taken:
    """One hand-off on decode's side; `local_tokens` are in its own blocks already, and `num_unread`
    were neither there nor read at COMMIT."""

    prompt: TakenPrompt
    machine: Decode = field(default_factory=Decode)
    ranges: list[ReadRange] = field(default_factory=list)
    latest: HandoffMessage | None = None
    committed: HandoffMessage | None = None
    stored: HandoffMessage | None = None
    block_ids: list[int] = field(default_factory=list)
    local_tokens: int = 0
    num_unread: int = 0
    num_reads: int = 0
    offered_s: float = 0.0
    announced_s: float = 0.0
    committed_s: float = 0.0
    heard_s: float = 0.0
    validating_s: float = 0.0
    renew_at_s: float = 0.0
    repeat_at_s: float = 0.0
    why: str = ""
    told: bool = False

    @property
    def shape(self) -> Shape:
        return Shape((self.all_bits,), 0, NO_END, NO_END)

    @property
    def all_bits(self) -> int:
        return (1 << len(self.ranges)) - 1

    @property
    def num_to_read(self) -> int:
        """Prompt tokens whose KV does not lie here already."""
        return max(0, self.prompt.num_tokens - self.local_tokens)

    @property
    def num_on_the_way(self) -> int:
        """Tokens that are announced and not here."""
        waited_for = [part for part in self.ranges if not part.here]
        return sum(max(0, part.end - max(part.start, self.local_tokens)) for part in waited_for)

    @property
    def known_tokens(self) -> int:
        return self.ranges[-1].end if self.ranges else 0
