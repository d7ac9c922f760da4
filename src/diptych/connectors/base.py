"""The contract of a KV connector: how KV enters and leaves an engine.

A connector has two halves. The *scheduler* half lives beside the scheduler and decides by tokens;
the *worker* half lives beside the runner and moves bytes. Per step, the scheduler half builds a
`KVConnectorMetadata` that reaches the worker half with the step; what the worker half finished
comes back in `KVConnectorOutput`. The names are those of the field.

Addressing is by token position everywhere; block ids are only this engine's way to find the bytes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from diptych.engine.request import KVCommit, KVTransferParams

if TYPE_CHECKING:
    from torch import Tensor

    from diptych.engine.control_port import ControlPort


class RequestView(Protocol):
    """What a connector may read of a scheduler's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output so far."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that needed no computing; below 0 while that is not known."""
        ...

    @property
    def is_handed_off(self) -> bool:
        """Whether the request has ended here and goes on elsewhere."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        ...

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def tenant(self) -> str:
        """Whose quota in the store is charged; empty: nobody's."""
        ...

    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...

    def prefix_hash(self, num_tokens: int) -> bytes:
        """Name of the first `num_tokens` tokens (`hashing.HashChain.prefix_hash`)."""
        ...


# bytes of one element, for the dtypes whose KV can be moved
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where a KV cache keeps its bytes: one tensor per group.

    The tensor is `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`, contiguous: one
    block is one run of bytes. Axis 3 is key, value.
    """

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: str
    # the memfd that a CPU's cache lies in, for connectors that share it; the cache owns it
    memfd: int | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (
            self.num_blocks,
            self.num_kv_heads,
            self.num_layers,
            2,
            self.block_size,
            self.head_dim,
        )

    @property
    def bytes_per_token(self) -> int:
        """Of one token's KV over all heads and layers; 0 for a dtype that cannot be moved."""
        item = ITEM_BYTES.get(self.dtype, 0)
        return self.num_kv_heads * self.num_layers * 2 * self.head_dim * item


class StepStage(enum.Enum):
    """What has become of a step: its rows are written, the device has it, its tokens are known,
    they were sent."""

    WRITTEN = enum.auto()
    LAUNCHED = enum.auto()
    KNOWN = enum.auto()
    SENT = enum.auto()


class KVConnectorMetadata:
    """What the scheduler half tells the worker half for one step; each connector has its own."""


@dataclass(slots=True)
class TransferRates:
    """What was measured: bytes loaded and prompt tokens computed, with the seconds they took; and
    the seconds after which loads had failed, of which so many bytes were wanted."""

    loaded_bytes: int = 0
    load_s: float = 0.0
    computed_tokens: int = 0
    compute_s: float = 0.0
    failed_bytes: int = 0
    failed_s: float = 0.0

    def failed(self, num_bytes: int, seconds: float) -> None:
        self.failed_bytes += num_bytes
        self.failed_s += seconds

    def loaded(self, num_bytes: int, seconds: float) -> None:
        self.loaded_bytes += num_bytes
        self.load_s += seconds

    def computed(self, num_tokens: int, seconds: float) -> None:
        self.computed_tokens += num_tokens
        self.compute_s += seconds


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What comes with KV that a peer has computed: the token that it sampled after it (None where
    that is known already), and the prompt tokens that it had found computed."""

    token_id: int | None
    num_cached_tokens: int


@dataclass(slots=True)
class KVConnectorOutput:
    """What the worker half finished since it was last asked.

    A load that failed is in `finished_recving` and in `failed_recving`, which gives the number of
    tokens from position 0 that are valid all the same. A save that failed is in `finished_sending`
    without an entry in `commits` that covers the prompt. `num_dropped_saves` counts objects that
    found no room on their way out, `num_corrupt` requests whose KV came from a peer with a
    wrong checksum. `handed_over` is of loads from a peer's memory. A request in
    `failed_handoffs`, which says why, ends here: whoever sent it decides how it goes on. One in
    `left_to_store` (and in `finished_recving`) goes on as any other that waits: its peer has
    computed it, but could not hold it; nothing writes its blocks any more. `saved` are requests of
    which a save has ended that was to be told of, and is no hand-off.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: dict[str, int] = field(default_factory=dict)
    commits: dict[str, KVCommit] = field(default_factory=dict)
    handed_over: dict[str, HandedOver] = field(default_factory=dict)
    failed_handoffs: dict[str, str] = field(default_factory=dict)
    left_to_store: dict[str, HandedOver] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    num_dropped_saves: int = 0
    num_corrupt: int = 0
    rates: TransferRates | None = None

    def split_sent(self) -> KVConnectorOutput | None:
        """Take out what was sent, with its commits."""
        if not self.finished_sending:
            return None
        sent = KVConnectorOutput(finished_sending=self.finished_sending, commits=self.commits)
        self.finished_sending, self.commits = set(), {}
        return sent

    def split_arrived(self) -> KVConnectorOutput | None:
        """Take out the loads that peers' KV has come for: all of it, and valid."""
        if not self.handed_over:
            return None
        arrived = KVConnectorOutput(
            finished_recving=set(self.handed_over), handed_over=self.handed_over
        )
        self.finished_recving -= arrived.finished_recving
        self.handed_over = {}
        return arrived

    @property
    def empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.commits
            or self.failed_handoffs
            or self.saved
            or self.num_dropped_saves
            or self.num_corrupt
            or self.rates
        )


class KVConnectorScheduler(ABC):
    """The scheduler half. No method but `await_arrival` and `flush` blocks or does I/O longer than
    a local look-up."""

    def request_added(self, request: RequestView) -> None:
        """The request waits from now on: what takes time to find may be looked up meanwhile."""
        return

    def request_preempted(self, request: RequestView) -> bool:
        """The request lost its blocks; True if the connector may bring KV back that it had."""
        return False

    def request_left_to_store(self, request: RequestView) -> None:
        """No peer brings the request's KV any more: it may be looked for as any other's is."""
        return

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, num_pending_tokens: int = 0
    ) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that the connector can bring, without side effects.

        Args:
            num_pending_tokens: prompt tokens of other requests that are to be computed.

        Returns:
            (tokens, asynchronous). Asynchronous loads park the request in WAITING_FOR_REMOTE_KVS
            until the worker half reports it; synchronous ones are done by `start_load_kv` before
            the step's forward pass. (0, False) where there is nothing. None in place of a number:
            it is not known yet, ask again in the next step; the request waits without delaying
            those behind it.
        """

    def num_computed_beside(self, request: RequestView) -> int:
        """Of the tokens that were just matched, asynchronously, the request computes the first so
        many itself while the others are loaded; 0: it waits until all have come."""
        return 0

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[int], num_external_tokens: int
    ) -> None:
        """Blocks for the request's tokens, external ones included, were allocated.

        Args:
            num_external_tokens: of those that were matched, the last so many are wanted: all, but
                for `num_computed_beside`.
        """

    @abstractmethod
    def build_connector_meta(
        self, scheduled: dict[str, tuple[RequestView, list[int], int]]
    ) -> KVConnectorMetadata:
        """The step's orders. `scheduled` maps each scheduled request to (request, its block ids,
        tokens that will be computed once this step ends). Resets what was gathered for the step."""

    @abstractmethod
    def request_finished(self, request: RequestView, block_ids: list[int]) -> bool:
        """The request ended; True keeps its blocks until the worker half reports it sent."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the worker half finished and measured."""
        return

    def is_read(self, request_id: str) -> bool:
        """Whether a peer may be reading what the request has computed so far: others give way
        first where blocks run out."""
        return False

    @property
    def is_expecting(self) -> bool:
        """Whether KV is about to arrive, within a step or so: one planned ahead of the results of
        those in flight would go without it."""
        return False

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        """Wait for KV that is about to arrive, for the first or for all of it, until `until_s` on
        the monotonic clock: the next step, which is to have it, is not planned before."""
        return

    def hold_until_s(self, limit_s: float) -> float:
        """Until when the device may be left without a step for KV that is to be here by `limit_s`,
        both on the monotonic clock; 0: there is none."""
        return 0.0

    def take_arrived(self) -> KVConnectorOutput | None:
        """KV that has arrived from peers and is valid, and nothing else; None: none. A step that is
        planned now may have it, whatever else is in flight."""
        return None

    def note_step(self, stage: StepStage, request_ids: Collection[str]) -> None:
        """A step that these are in has come so far; WRITTEN and SENT are of all that wait for it.
        A step of an engine without overlap is launched and known at once."""
        return

    def flush(self) -> None:
        """A prompt was handed over: let that be told before the next is launched, if it takes a
        fraction of a millisecond."""
        return

    @property
    def handoff_cards(self) -> bytes:
        """How peers can read this engine's pool (`peer_reads.encode_cards`); empty: they cannot."""
        return b""

    def attach_control(self, port: ControlPort) -> None:
        """Take over the way to the engines of peers; one that speaks to none closes it."""
        port.close()

    def shutdown(self) -> None:
        """Stop threads and drop connections. Idempotent."""
        return

    def abort(self, request_id: str) -> None:
        """The request was aborted while a load or save is under way: give it up. Its blocks stay
        quarantined until the worker half reports it (sent or received)."""
        return


class KVConnectorWorker(ABC):
    """The worker half, beside the runner. Byte movement happens on its own thread."""

    @abstractmethod
    def register_kv_caches(self, kv_cache: Tensor, layout: KVLayout) -> None:
        """Take the cache tensor, once, before the first step."""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Begin the step's loads; synchronous ones are complete on return."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once the step's synchronous loads of `layer` are in place."""
        return

    def save_kv_layer(self, layer: int) -> None:
        """What writes `layer` of the step's tokens to the cache has been launched. A captured step
        says so of all layers at its end; one that only decodes says nothing."""
        return

    @abstractmethod
    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        """The step's KV is in the cache (device work completed): begin its saves."""

    @abstractmethod
    def get_finished(self) -> KVConnectorOutput:
        """What finished since the last call. Never blocks."""

    def take_sent(self) -> KVConnectorOutput | None:
        """Of that `finished_sending` and its commits alone, None where there are none: they are
        told while a step runs, and do not concern it."""
        return None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of synchronous loads that hold nothing valid."""
        return set()

    def shutdown(self) -> None:
        """Stop threads, release memory and connections. Idempotent."""
        return
