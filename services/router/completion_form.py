"""Completion answers in OpenAI form."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.outputs import LogprobsAt
from diptych.services.router.formats import Answering, Form, Json, finite, top_token_ids, usage
from diptych.text.output_processor import OutputDelta, RequestState


class CompletionForm(Form):
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
            found["token_logprobs"].append(None if at is None else finite(at, token_id))
            found["top_logprobs"].append(None if at is None else self._top(at, token_id, count))
            offset += len(text(token_id))
        self._offsets[index] = offset
        return found

    def _top(self, at: LogprobsAt, token_id: int, count: int) -> dict[str, float]:
        """The token itself, then the most likely ones, by their text."""
        wanted = dict.fromkeys([token_id, *top_token_ids(at, count)])
        return {self._tokenizer.token_text(i): finite(at, i) for i in wanted}


def _prompt_positions(
    state: RequestState,
) -> tuple[list[int], list[LogprobsAt | None] | None]:
    """The prompt's token ids and what is known of their logprobs."""
    return state.request.prompt_token_ids, state.prompt_logprobs
