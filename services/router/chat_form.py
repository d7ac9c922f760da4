"""Chat answers in OpenAI form."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.outputs import LogprobsAt
from diptych.services.router.formats import Form, Json, finite, top_token_ids, usage
from diptych.text.output_processor import OutputDelta, RequestState


class ChatForm(Form):
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
            "logprob": finite(at, token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
