"""Engine outputs to text: one state per request, shared by `LLM`, `AsyncLLM` and the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.engine.request import EngineCoreOutputs, FinishReason, TokenLogprobs
from diptych.errors import EngineError
from diptych.outputs import CompletionOutput, Logprob, LogprobsAt, RequestOutput
from diptych.text.detokenizer import IncrementalDetokenizer
from diptych.text.processor import ProcessedRequest
from diptych.text.tokenizer import Tokenizer

UNUSED_TOKEN_ID = 4294967295


@dataclass(slots=True, kw_only=True)
class OutputDelta:
    """What is new of one output. `logprobs` has one entry for each of `token_ids`, if asked for.

    `should_abort`: the text ended at a stop string while the engine goes on with the request.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsAt] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    should_abort: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestState:
    """One request on its way to text.

    Tokens are taken by position, each once: what was seen already is dropped, a gap is an error.
    After the end nothing more is taken.
    """

    def __init__(self, request_id: str, request: ProcessedRequest, tokenizer: Tokenizer) -> None:
        params = request.sampling_params
        self.request_id = request_id
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                stop=params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            if params.detokenize
            else None
        )
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.logprobs: list[LogprobsAt] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[LogprobsAt | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer else ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def update(
        self,
        first_position: int,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason = FinishReason.UNSPECIFIED,
        stop_token_id: int = -1,
        num_cached_tokens: int | None = None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: TokenLogprobs | None = None,
        error: str | None = None,
    ) -> OutputDelta:
        """Take one entry of the engine's output.

        Raises:
            EngineError: the entry does not continue the tokens that were seen.
        """
        if self.finished:
            return OutputDelta()
        if num_cached_tokens is not None:
            self.num_cached_tokens = max(self.num_cached_tokens, num_cached_tokens)
        self._take_prompt_logprobs(prompt_logprobs)
        num_seen = len(self.token_ids) - first_position
        if token_ids and num_seen < 0:
            raise EngineError(f"output tokens are missing before position {first_position}")
        new_ids = list(token_ids[num_seen:])
        self.error = error
        delta = self._take_tokens(new_ids, finish_reason, stop_token_id)
        if logprobs is not None and self.logprobs is not None:
            taken = range(num_seen, num_seen + len(delta.token_ids))
            delta.logprobs = [self._logprobs_at(logprobs, index) for index in taken]
            self.logprobs.extend(delta.logprobs)
        return delta

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """End the output from outside (abort, lost worker); held-back text comes out."""
        if self.finished:
            return OutputDelta()
        self.error = error
        return self._take_tokens([], reason, -1)

    def output(self) -> RequestOutput:
        """All so far."""
        request = self.request
        return RequestOutput(
            request_id=self.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[self._completion()],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _completion(self) -> CompletionOutput:
        pairs = None if self.logprobs is None else zip(self.token_ids, self.logprobs, strict=False)
        return CompletionOutput(
            index=0,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if pairs is None else sum(at[i].logprob for i, at in pairs),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )

    def _take_tokens(
        self, new_ids: list[int], reason: FinishReason, stop_token_id: int
    ) -> OutputDelta:
        stopped_by_token = reason is FinishReason.STOP
        ends = reason is not FinishReason.UNSPECIFIED
        text, stop, num_taken = "", None, len(new_ids)
        if self._detokenizer is not None:
            text, stop, num_taken = self._detokenizer.append(new_ids, silent_last=stopped_by_token)
            if ends or stop is not None:
                rest = self._detokenizer.finish()
                text, stop = text + rest.text, rest.stop
        self.token_ids.extend(new_ids[:num_taken])
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif ends:
            self.finish_reason = reason
            if stop_token_id in (self.request.sampling_params.stop_token_ids or []):
                self.stop_reason = stop_token_id
        return OutputDelta(
            text=text,
            token_ids=new_ids[:num_taken],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            should_abort=stop is not None and not ends,
        )

    def _take_prompt_logprobs(self, packed: TokenLogprobs | None) -> None:
        if packed is None or self.prompt_logprobs is None:
            return
        room = len(self.request.prompt_token_ids) - len(self.prompt_logprobs)
        count = min(room, len(packed.token_ids) // packed.width)
        self.prompt_logprobs.extend(self._logprobs_at(packed, index) for index in range(count))

    def _logprobs_at(self, packed: TokenLogprobs, index: int) -> LogprobsAt:
        """Entry `index` of packed logprobs; the token itself comes first."""
        start = index * packed.width
        found: LogprobsAt = {}
        for place in range(packed.width):
            token_id = packed.token_ids[start + place]
            if token_id == UNUSED_TOKEN_ID or token_id in found:
                continue
            rank = packed.ranks[index] if place == 0 else place
            text = self._tokenizer.token_text(token_id) if self._detokenizer is not None else None
            found[token_id] = Logprob(packed.logprobs[start + place], rank, text)
        return found


class OutputProcessor:
    """The states of all requests of one engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request_id: str, request: ProcessedRequest) -> RequestState:
        """Start a request.

        Raises:
            EngineError: the id is in use.
        """
        if request_id in self._states:
            raise EngineError(f"request id {request_id} is in use")
        state = RequestState(request_id, request, self._tokenizer)
        self._states[request_id] = state
        return state

    def drop(self, request_id: str) -> RequestState | None:
        """Forget a request, if it is known."""
        return self._states.pop(request_id, None)

    def process(self, outputs: EngineCoreOutputs) -> list[tuple[RequestState, OutputDelta]]:
        """Take one step; entries of unknown requests are dropped, ended requests forgotten."""
        results = []
        offset = 0
        for entry, request_id in enumerate(outputs.request_ids):
            count = outputs.token_counts[entry]
            token_ids = outputs.token_ids[offset : offset + count]
            offset += count
            state = self._states.get(request_id)
            if state is None:
                continue
            delta = state.update(
                outputs.first_positions[entry],
                token_ids,
                finish_reason=FinishReason(outputs.finish_reasons[entry]),
                stop_token_id=outputs.stop_token_ids[entry],
                num_cached_tokens=outputs.num_cached_tokens[entry],
                logprobs=outputs.logprobs.get(entry),
                prompt_logprobs=outputs.prompt_logprobs.get(entry),
                error=outputs.errors.get(entry),
            )
            if state.finished:
                del self._states[request_id]
            results.append((state, delta))
        return results
