"""Offline use: prompts in, answers out, with the engine in this process."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from diptych.engine.arguments import engine_config
from diptych.engine.frozen_garbage import frozen_garbage
from diptych.engine.request import EngineCoreRequest, FinishReason
from diptych.errors import EngineDeadError, EngineError, InvalidRequestError
from diptych.inputs import ParsedPrompt, PromptType, TextPrompt, TokensPrompt, parse_prompts
from diptych.models.config import ModelConfig
from diptych.outputs import RequestOutput
from diptych.sampling_params import SamplingParams
from diptych.text.chat_template import ChatTemplate
from diptych.text.no_tokenizer import NoTokenizer
from diptych.text.output_processor import OutputProcessor, RequestState
from diptych.text.processor import ProcessedRequest, Processor
from diptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from diptych.engine.core import EngineCore

_IDLE_S = 0.001

Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """One model, loaded in this process.

    Args:
        model: `smollm2`, a directory, a hub id, or a .gguf file.
        skip_tokenizer_init: prompts are token ids and outputs have no text; no file of a tokenizer
            is needed.
        arguments: the fields of `EngineConfig`, and those arguments of the field's `LLM` that have
            a meaning here; an unknown one is an error.

    Requests without a seed draw theirs from `seed` (default 0): runs repeat. `max_tokens` is cut to
    what the context holds. Close with `shutdown` or use as a context manager.

    Raises:
        ModelLoadError: the model is missing, broken or not supported.
        ConfigError: an argument is unknown or has no valid value.
        UnsupportedFeatureError: the argument's value is not supported in this version.
    """

    def __init__(
        self, model: str = "smollm2", *, skip_tokenizer_init: bool = False, **arguments: Any
    ) -> None:
        from diptych.engine.core import make_engine_core
        from diptych.models.fetch import resolve_model

        config = engine_config(model, arguments)
        path = resolve_model(config.model, config.revision)
        tokenizer = NoTokenizer() if skip_tokenizer_init else Tokenizer.from_directory(path)
        core = make_engine_core(dataclasses.replace(config, model=str(path)))
        self.config = config
        self.model_config = ModelConfig.from_directory(path)
        self._core: EngineCore = core
        self._close = weakref.finalize(self, core.close)
        self._request_ids = itertools.count()
        self._tokenizer = tokenizer
        self._makes_text = not skip_tokenizer_init
        self._outputs = OutputProcessor(tokenizer)
        self._processor = Processor(
            self.model_config,
            tokenizer,
            ChatTemplate.from_directory(path),
            max_model_len=core.info.max_model_len,
            max_logprobs=config.max_logprobs,
            rng=random.Random(config.seed),
            clamp_max_tokens=True,
        )

    def generate(
        self,
        prompts: PromptType | Sequence[str | list[int]] | Sequence[TextPrompt | TokensPrompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the results are in the order of the prompts.

        All prompts are checked before the first one runs. `sampling_params` is one for all or one
        for each.

        Raises:
            InvalidRequestError: a prompt or a parameter is invalid.
            EngineError: the engine failed.
        """
        with frozen_garbage():
            parsed = parse_prompts(prompts)
            params = self._one_each(sampling_params, len(parsed))
            requests = [
                self._processor.completion(prompt["prompt"], one)
                for prompt, one in zip(parsed, params, strict=True)
            ]
            return self._run(requests, parsed, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; as `generate`."""
        conversations = _conversations(messages)
        params = self._one_each(sampling_params, len(conversations))
        requests = [
            self._processor.chat(
                conversation,
                one,
                add_generation_prompt=add_generation_prompt,
                **{"tools": list(tools) if tools else None, **(chat_template_kwargs or {})},
            )
            for conversation, one in zip(conversations, params, strict=True)
        ]
        with frozen_garbage():
            return self._run(requests, None, None, use_tqdm)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._processor.max_model_len

    @property
    def device(self) -> str:
        """The torch device that the model is on."""
        import torch

        found = "cuda" if torch.cuda.is_available() else "cpu"
        return found if self.config.device == "auto" else self.config.device

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def shutdown(self) -> None:
        """Release the model and its memory. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _one_each(self, params: Params | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [self._without_text(params)] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"there are {count} prompts but {len(params)} sampling_params",
                param="sampling_params",
            )
        return [self._without_text(one) for one in params]

    def _without_text(self, params: SamplingParams) -> SamplingParams:
        fits = self._makes_text or not params.detokenize
        return params if fits else params.replace(detokenize=False)

    def _run(
        self,
        requests: Sequence[ProcessedRequest],
        parsed: Sequence[ParsedPrompt] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run checked requests to their end; on any exception they are aborted."""
        if not self._close.alive:
            raise EngineDeadError("this LLM has been shut down")
        if priority is not None and len(priority) != len(requests):
            raise InvalidRequestError("priority must have one number for each prompt")
        pending: deque[EngineCoreRequest] = deque()
        states: list[RequestState] = []
        for index, request in enumerate(requests):
            request_id = str(next(self._request_ids))
            states.append(self._outputs.add(request_id, request))
            pending.append(
                request.to_engine(
                    request_id,
                    priority=priority[index] if priority else 0,
                    arrival_time_s=time.monotonic(),
                    cache_salt=parsed[index]["cache_salt"] if parsed else None,
                )
            )
        try:
            self._drain(pending, _Progress(len(requests), use_tqdm))
        finally:
            self._forget(states)
        return [state.output() for state in states]

    def _drain(self, pending: deque[EngineCoreRequest], progress: _Progress) -> None:
        """Step until all have ended, never queueing more than the engine takes."""
        with progress:
            while pending or len(self._outputs):
                room = self._core.info.max_num_queued_reqs - len(self._outputs) + len(pending)
                for _ in range(min(room, len(pending))):
                    self._core.add_request(pending.popleft())
                outputs = self._core.step()
                if self._core.is_waiting_for_transfers:
                    if not pending and not self._core.has_work:
                        raise EngineError("the engine has no work left but requests have no end")
                    time.sleep(_IDLE_S)
                for state, delta in self._outputs.process(outputs) if outputs else ():
                    if state.finish_reason is FinishReason.ERROR:
                        raise EngineError(state.error or "the engine failed")
                    if delta.should_abort:
                        self._core.abort([state.request_id])
                    progress.advance(state)
        if self._core.has_work:
            # a step may be in flight for requests that ended: their blocks come free with it
            self._core.step()

    def _forget(self, states: Sequence[RequestState]) -> None:
        left = [s.request_id for s in states if self._outputs.drop(s.request_id) is not None]
        if left:
            self._core.abort(left)


class _Progress:
    """A progress bar over requests, with token rates."""

    def __init__(self, num_requests: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=num_requests,
            desc="Processed prompts",
            disable=not shown,
            dynamic_ncols=True,
            postfix="input: 0.0 tok/s, output: 0.0 tok/s",
        )
        self._start_s = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, state: RequestState) -> None:
        """Count a request, if it has ended."""
        if not state.finished or self._bar.disable:
            return
        self._num_prompt_tokens += len(state.request.prompt_token_ids)
        self._num_output_tokens += len(state.token_ids)
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_prompt_tokens / elapsed_s:.1f} tok/s, "
            f"output: {self._num_output_tokens / elapsed_s:.1f} tok/s",
            refresh=False,
        )
        self._bar.update()


def _conversations(messages: Sequence[Any]) -> list[Sequence[Mapping[str, Any]]]:
    """One conversation or a list of them, as a list."""
    if messages and isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return list(messages)
    return [messages]
