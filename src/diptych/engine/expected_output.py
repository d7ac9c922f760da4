"""How far the requests in the batch are expected to grow.

A request that is admitted into the last free blocks is preempted as soon as those before it grow,
and computed again: on a pool that holds a part of what waits that costs a sixth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.scheduler_request import SchedulerRequest

# of their limit, until the first have ended: a chat has the context for its limit and uses little
_FIRST_SHARE = 0.1
# of one more request that has ended
_LEARNING_RATE = 0.05
# output tokens that count at most: limits are often the whole context, answers rarely
_MOST_TOKENS = 4096
# that one is expected to write whatever others wrote, if its limit lets it
_LEAST_TOKENS = 256


class ExpectedOutput:
    """Learns which share of their limit requests use; one that ignores the end of text uses all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.share = _FIRST_SHARE

    def learn(self, request: SchedulerRequest) -> None:
        """The request has ended by itself."""
        limit = min(request.max_output_tokens, _MOST_TOKENS)
        if limit > 0 and not request.sampling_params.ignore_eos:
            used = min(request.num_output_tokens / limit, 1.0)
            self.share += _LEARNING_RATE * (used - self.share)

    def blocks(
        self, running: Iterable[SchedulerRequest], loading: Iterable[SchedulerRequest] = ()
    ) -> int:
        """Blocks that these will need beyond theirs: for their output and, of running ones, for the
        part of the prompt that no step has been planned for; loading ones have all their prompt's.
        """
        tokens = sum(self.tokens(request) for request in loading)
        for request in running:
            if request.beside is not None:
                tokens += self.tokens(request)
                continue
            unplanned = len(request.all_token_ids) - request.num_planned_tokens
            tokens += self.tokens(request) + max(0, unplanned)
        return -(-tokens // self._block_size)

    def tokens(self, request: SchedulerRequest) -> int:
        """Output tokens that it will still make."""
        made = len(request.all_token_ids) - request.num_prompt_tokens
        limit = min(request.max_output_tokens, _MOST_TOKENS)
        if not request.sampling_params.ignore_eos:
            limit = min(limit, max(int(limit * self.share), _LEAST_TOKENS))
        return max(0, limit - made)
