"""Answers in OpenAI form: whole responses and stream chunks, as plain objects for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from diptych.errors import DiptychError
from diptych.outputs import LogprobsAt
from diptych.services.router.openai_api import ApiRequest
from diptych.text.output_processor import OutputDelta, RequestState
from diptych.text.tokenizer import Tokenizer

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What all parts of one answer share."""

    response_id: str
    model: str
    created: int
    api: ApiRequest
    tokenizer: Tokenizer


class Format(Protocol):
    """One of the two forms. `index` is the choice."""

    def response(self, states: Sequence[RequestState]) -> Json:
        """The whole answer."""
        ...

    def opening(self, index: int, state: RequestState) -> Json | None:
        """The chunk before a choice's first text, if the form has one."""
        ...

    def chunk(self, index: int, state: RequestState, delta: OutputDelta) -> Json:
        """The chunk for one piece of news."""
        ...

    def usage_chunk(self, states: Sequence[RequestState]) -> Json:
        """The last chunk of a stream with usage."""
        ...


def error_body(error: DiptychError) -> Json:
    """An error in OpenAI form."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def usage(states: Sequence[RequestState]) -> Json:
    """Token counts over all choices."""
    prompt = sum(len(state.request.prompt_token_ids) for state in states)
    completion = sum(len(state.token_ids) for state in states)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_cached_tokens for s in states)},
    }


def top_token_ids(at: LogprobsAt, count: int) -> list[int]:
    """The `count` most likely token ids of a position, best first; -1 for all there are."""
    ranked = sorted(at, key=lambda token_id: at[token_id].rank or 0)
    if count < 0:
        return ranked
    return [token_id for token_id in ranked if (at[token_id].rank or 0) <= count]


class Form:
    """What the two forms have in common."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._api = answering.api
        self._tokenizer = answering.tokenizer

    def usage_chunk(self, states: Sequence[RequestState]) -> Json:
        return {**self._head(self.chunk_object), "choices": [], "usage": usage(states)}

    def _head(self, kind: str) -> Json:
        return {
            "id": self._answering.response_id,
            "object": kind,
            "created": self._answering.created,
            "model": self._answering.model,
        }

    def _chunk(self, choice: Json, state: RequestState) -> Json:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self._api.continuous_usage:
            chunk["usage"] = usage([state])
        elif self._api.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt_logprobs(self, state: RequestState) -> list[Json | None] | None:
        if state.prompt_logprobs is None:
            return None
        return [
            None if at is None else {str(token_id): _plain(at, token_id) for token_id in at}
            for at in state.prompt_logprobs
        ]


def finite(at: LogprobsAt, token_id: int) -> float:
    """JSON has no infinity."""
    return max(at[token_id].logprob, LEAST_LOGPROB)


def _plain(at: LogprobsAt, token_id: int) -> Json:
    entry = at[token_id]
    return {
        "logprob": finite(at, token_id),
        "rank": entry.rank,
        "decoded_token": entry.decoded_token,
    }
