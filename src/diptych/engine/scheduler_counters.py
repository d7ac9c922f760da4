"""What a scheduler counts from its start on."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from diptych.engine.request import SchedulerStats
from diptych.engine.scheduler_request import SchedulerRequest


@dataclass(slots=True)
class SchedulerCounters:
    """The counters of `SchedulerStats`; a recomputed token counts each time it is computed."""

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

    def count_admission(self, request: SchedulerRequest, num_hit_tokens: int) -> None:
        """A request leaves the queue, with so many tokens found in the local prefix cache."""
        self.prompt_tokens_local_cache_hit += min(num_hit_tokens, request.num_prompt_tokens)
        if not request.skip_reading_prefix_cache:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_hit_tokens

    def count_computed(self, request: SchedulerRequest, count: int) -> None:
        """The request's next `count` tokens have been computed."""
        self.prompt_tokens_local_compute += min(count, request.num_pending_prompt_tokens)

    def count_loaded(self, request: SchedulerRequest, first: int, end: int) -> None:
        """KV of token positions [first, end) came from outside."""
        prompt = request.num_prompt_tokens
        self.prompt_tokens_external_kv_transfer += max(0, min(end, prompt) - first)

    def stats(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_pending_tokens: int,
        num_kv_blocks: int,
        num_free_kv_blocks: int,
    ) -> SchedulerStats:
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_pending_tokens=num_pending_tokens,
            num_kv_blocks=num_kv_blocks,
            num_free_kv_blocks=num_free_kv_blocks,
            **asdict(self),
        )
