"""What goes into an engine and what comes out, as values; no torch here.

These structs cross the socket between the service process and the engine process (msgspec).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from diptych.sampling_params import SamplingParams

MAX_CACHE_SALT_CHARS = 1024
DEFAULT_TTL_S = 30.0


class FinishReason(enum.IntEnum):
    """Why a request ended; the numbers are those of `diptych.v1.FinishReason`."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    def __str__(self) -> str:
        return self.name.lower()


class KVObject(msgspec.Struct, frozen=True, kw_only=True):
    """One stored object of a hand-off: KV of token positions [start_token, end_token)."""

    key: bytes
    start_token: int
    end_token: int
    checksum: int
    num_bytes: int


class KVCommit(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's KV lies: objects in token order without gaps from position 0. One that is
    `pending` names none: they are being stored, under the names that the prompt gives them."""

    epoch: int
    kv_namespace: str
    num_tokens: int
    objects: list[KVObject]
    connector: str
    num_cached_tokens: int = 0
    pending: bool = False


class HandoffPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The worker at the other end of a hand-off; engines know it by its incarnation."""

    worker_id: str
    incarnation: str
    address: str = ""


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-off part of a request: at most one of the two sides.

    `do_remote_decode`: sample token 1, hand the prompt's KV over, finish.
    `commit`: the prompt's KV lies there; it is loaded, what fails to load is recomputed.
    `peer`: the KV goes straight from worker to worker. With `do_remote_decode` it is the one that
    reads; alone, the one that is read: the request waits for its announcements, and ends with an
    entry of `handoff_failures` where the KV does not arrive within `ttl_s` or later deadlines.
    """

    epoch: int = 1
    do_remote_decode: bool = False
    commit: KVCommit | None = None
    peer: HandoffPeer | None = None
    ttl_s: float = DEFAULT_TTL_S

    @property
    def reads_peer(self) -> bool:
        """Whether the prompt's KV is read from a peer while or after that computes it."""
        return self.peer is not None and not self.do_remote_decode


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine core takes it: checked, tokenised.

    `output_token_ids` were sampled elsewhere and are with the client already: they join the prompt
    for computing, count as output for penalties, limits and positions, and are not sent again.
    `sampling_params` has `seed` and `max_tokens` set.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    priority: int = 0
    arrival_time_s: float = 0.0
    cache_salt: str | None = None
    tenant: str = ""
    kv_transfer_params: KVTransferParams | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a run of tokens, packed `[tokens * width]`.

    Entry 0 of a token is the token itself, entries 1.. are the most likely in order; unused entries
    at the end carry id 4294967295. `ranks` has one per token: that of the token itself, from 1.
    """

    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @classmethod
    def joined(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Runs of equal width, one after another; at least one."""
        return cls(
            width=parts[0].width,
            token_ids=[i for part in parts for i in part.token_ids],
            logprobs=[p for part in parts for p in part.logprobs],
            ranks=[r for part in parts for r in part.ranks],
        )


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after a step and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens_local_compute: int = 0
    prompt_tokens_local_cache_hit: int = 0
    prompt_tokens_external_kv_transfer: int = 0
    generation_tokens: int = 0
    num_kv_load_failures: int = 0
    num_kv_save_failures: int = 0
    num_kv_save_drops: int = 0
    num_kv_corrupt: int = 0

    @property
    def kv_usage(self) -> float:
        if not self.num_kv_blocks:
            return 0.0
        return 1.0 - self.num_free_kv_blocks / self.num_kv_blocks


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one step, struct of arrays: entry i of each list belongs together.

    `first_positions[i]` is the position in the output (0 is token 1) of the entry's first token;
    its tokens are the next `token_counts[i]` of `token_ids`. An entry may have no token (a commit,
    an abort, an error). A request's last entry has a finish reason or a commit. `commits`,
    `logprobs`, `prompt_logprobs`, `errors`, `handoff_failures` are keyed by entry. An entry of
    `handoff_failures` ends an attempt (with ERROR) whose KV did not arrive; no token was sampled.
    A direct hand-off's commit names no objects and the connector that read: it comes once the
    reader has all, or (with `num_tokens` 0) has given up or never came.
    """

    request_ids: list[str] = []
    first_positions: list[int] = []
    token_counts: list[int] = []
    token_ids: list[int] = []
    finish_reasons: list[int] = []
    stop_token_ids: list[int] = []
    num_cached_tokens: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, TokenLogprobs] = {}
    commits: dict[int, KVCommit] = {}
    errors: dict[int, str] = {}
    handoff_failures: dict[int, str] = {}
    stats: SchedulerStats = SchedulerStats()
