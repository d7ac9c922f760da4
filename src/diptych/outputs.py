"""What a user of `LLM` and `AsyncLLM` gets back. Names follow the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability, its rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]
"""Of one position: the token itself first, then the most likely ones in order."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer.

    `finish_reason` is None while it grows, else "stop", "length", "abort" or "error".
    `stop_reason` is the stop string or stop token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One request and its answers so far.

    `prompt_logprobs` has one entry per prompt token, None for the first.
    `num_cached_tokens` counts prompt tokens whose KV was not computed here.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int | None = None
