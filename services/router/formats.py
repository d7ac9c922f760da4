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


class _Form:
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


class ChatForm(_Form):
    """`chat.completion` and its chunks."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def response(self, states: Sequence[RequestState]) -> Json:
        body = self._head(self.object)
        body["choices"] = [self._choice(index, state) for index, state in enumerate(states)]
        body["usage"] = usage(states)
        if self._api.sampling.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(states[0])
        if self._api.return_token_ids:
            body["prompt_token_ids"] = states[0].request.prompt_token_ids
        return body

    def opening(self, index: int, state: RequestState) -> Json | None:
        choice: Json = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk(choice, state)
        if self._api.return_token_ids:
            chunk["prompt_token_ids"] = state.request.prompt_token_ids
        return chunk

    def chunk(self, index: int, state: RequestState, delta: OutputDelta) -> Json:
        choice: Json = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or not delta.finished else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": None if delta.finish_reason is None else str(delta.finish_reason),
        }
        if delta.finished:
            choice["stop_reason"] = delta.stop_reason
        if self._api.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice, state)

    def _choice(self, index: int, state: RequestState) -> Json:
        choice: Json = {
            "index": index,
            "message": {"role": "assistant", "content": state.text},
            "logprobs": self._logprobs(state.token_ids, state.logprobs),
            "finish_reason": str(state.finish_reason),
            "stop_reason": state.stop_reason,
        }
        if self._api.return_token_ids:
            choice["token_ids"] = state.token_ids
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[LogprobsAt] | None) -> Json | None:
        count = self._api.sampling.logprobs
        if count is None or logprobs is None:
            return None
        content = []
        for token_id, at in zip(token_ids, logprobs, strict=False):
            entry = self._entry(at, token_id)
            entry["top_logprobs"] = [self._entry(at, top) for top in top_token_ids(at, count)]
            content.append(entry)
        return {"content": content}

    def _entry(self, at: LogprobsAt, token_id: int) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": _finite(at, token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionForm(_Form):
    """`text_completion` and its chunks. `echo` puts the prompt first, in text and logprobs."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, answering: Answering) -> None:
        super().__init__(answering)
        self._offsets: dict[int, int] = {}

    def response(self, states: Sequence[RequestState]) -> Json:
        body = self._head(self.object)
        body["choices"] = [self._choice(index, state) for index, state in enumerate(states)]
        body["usage"] = usage(states)
        return body

    def opening(self, index: int, state: RequestState) -> Json | None:
        if not self._api.echo:
            return None
        choice: Json = {
            "index": index,
            "text": self._prompt_text(state),
            "logprobs": self._logprobs(index, *_prompt_positions(state)),
            "finish_reason": None,
            "stop_reason": None,
        }
        if self._api.return_token_ids:
            choice["token_ids"] = []
        return self._chunk(choice, state)

    def chunk(self, index: int, state: RequestState, delta: OutputDelta) -> Json:
        choice: Json = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.token_ids, delta.logprobs),
            "finish_reason": None if delta.finish_reason is None else str(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if self._api.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if len(state.token_ids) == len(delta.token_ids):
                choice["prompt_token_ids"] = state.request.prompt_token_ids
        return self._chunk(choice, state)

    def _choice(self, index: int, state: RequestState) -> Json:
        token_ids = state.token_ids
        logprobs: list[LogprobsAt | None] | None = None
        if state.logprobs is not None:
            logprobs = [*state.logprobs]
        if self._api.echo and logprobs is not None:
            prompt_ids, at_prompt = _prompt_positions(state)
            token_ids, logprobs = [*prompt_ids, *token_ids], [*(at_prompt or []), *logprobs]
        choice: Json = {
            "index": index,
            "text": (self._prompt_text(state) if self._api.echo else "") + state.text,
            "logprobs": self._logprobs(index, token_ids, logprobs),
            "finish_reason": str(state.finish_reason),
            "stop_reason": state.stop_reason,
        }
        if self._api.sampling.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(state)
        if self._api.return_token_ids:
            choice["token_ids"] = state.token_ids
            choice["prompt_token_ids"] = state.request.prompt_token_ids
        return choice

    def _prompt_text(self, state: RequestState) -> str:
        if state.request.prompt is not None:
            return state.request.prompt
        ids = state.request.prompt_token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsAt | None] | None,
    ) -> Json | None:
        """Logprobs by position; the first prompt token of an echo has none."""
        count = self._api.sampling.logprobs
        if count is None or logprobs is None:
            return None
        text = self._tokenizer.token_text
        found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        offset = self._offsets.get(index, 0)
        for token_id, at in zip(token_ids, logprobs, strict=False):
            found["text_offset"].append(offset)
            found["tokens"].append(text(token_id))
            found["token_logprobs"].append(None if at is None else _finite(at, token_id))
            found["top_logprobs"].append(None if at is None else self._top(at, token_id, count))
            offset += len(text(token_id))
        self._offsets[index] = offset
        return found

    def _top(self, at: LogprobsAt, token_id: int, count: int) -> dict[str, float]:
        """The token itself, then the most likely ones, by their text."""
        wanted = dict.fromkeys([token_id, *top_token_ids(at, count)])
        return {self._tokenizer.token_text(i): _finite(at, i) for i in wanted}


def _prompt_positions(
    state: RequestState,
) -> tuple[list[int], list[LogprobsAt | None] | None]:
    """The prompt's token ids and what is known of their logprobs."""
    return state.request.prompt_token_ids, state.prompt_logprobs


def _finite(at: LogprobsAt, token_id: int) -> float:
    """JSON has no infinity."""
    return max(at[token_id].logprob, LEAST_LOGPROB)


def _plain(at: LogprobsAt, token_id: int) -> Json:
    entry = at[token_id]
    return {
        "logprob": _finite(at, token_id),
        "rank": entry.rank,
        "decoded_token": entry.decoded_token,
    }
