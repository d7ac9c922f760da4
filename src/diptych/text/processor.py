"""A prompt and its parameters to what the engine takes: checked, tokenised, complete."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.engine.request import EngineCoreRequest
from diptych.errors import ContextLengthError, InvalidRequestError
from diptych.models.config import ModelConfig
from diptych.sampling_params import MAX_LOGPROBS, SamplingParams
from diptych.text.chat_template import ChatTemplate
from diptych.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request that cannot be invalid: `sampling_params` has seed, max_tokens, bad word ids."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]

    def to_engine(self, request_id: str, **fields: Any) -> EngineCoreRequest:
        """The engine's form; `fields` are the other fields of `EngineCoreRequest`."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=self.sampling_params,
            eos_token_ids=self.eos_token_ids,
            **fields,
        )


class Processor:
    """Checks against one model. Safe to use from several threads.

    `max_tokens=None` means what is left of the context. An explicit `max_tokens` that does not fit
    is refused, or cut to what fits where `clamp_max_tokens` is set (offline use).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        max_model_len: int,
        max_logprobs: int = MAX_LOGPROBS,
        rng: random.Random,
        clamp_max_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = model_config.vocab_size
        self.eos_token_ids = list(model_config.eos_token_ids)
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in self.eos_token_ids:
            self.eos_token_ids.append(tokenizer.eos_token_id)
        self._chat_template = chat_template
        self._max_logprobs = max_logprobs
        self._rng = rng
        self._clamp_max_tokens = clamp_max_tokens

    def completion(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """A plain prompt, as text or token ids.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid for this model.
            ContextLengthError: the prompt, or prompt and max_tokens, do not fit the context.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt must not be empty", param="prompt")
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return self._finish(prompt, ids, params, "prompt")
        return self._finish(None, self._checked_ids(prompt), params, "prompt")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> ProcessedRequest:
        """A conversation, put through the model's chat template; raises as `completion`."""
        text = self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **template_variables
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self._finish(text, ids, params, "messages")

    def _finish(
        self, prompt: str | None, ids: list[int], params: SamplingParams, part: str
    ) -> ProcessedRequest:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("sampling_params must be a SamplingParams")
        if not ids:
            raise InvalidRequestError(f"the {part} must not be empty", param=part)
        params.check_against_model(vocab_size=self.vocab_size, max_logprobs=self._max_logprobs)
        words = [list(word) for word in params.bad_words_token_ids or []]
        words += self._bad_word_ids(params.bad_words or [])
        params = params.completed(
            seed=self._rng.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=self._max_tokens(len(ids), params, part),
            bad_words_token_ids=words or None,
        )
        params.check_logit_edits(len(self.eos_token_ids))
        return ProcessedRequest(
            prompt=prompt,
            prompt_token_ids=ids,
            sampling_params=params,
            eos_token_ids=self.eos_token_ids,
        )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, part: str) -> int:
        room = self.max_model_len - num_prompt_tokens
        wanted = params.max_tokens
        asked = f"{num_prompt_tokens} in the {part}"
        if room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but you "
                f"requested at least {num_prompt_tokens + 1} tokens ({asked}, 1 or more in the "
                f"completion). Please reduce the length of the {part}.",
                param=part,
            )
        if wanted is None or (wanted > room and self._clamp_max_tokens):
            return room
        if wanted > room:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but you "
                f"requested {num_prompt_tokens + wanted} tokens ({asked}, {wanted} in the "
                f"completion). Please reduce the length of the {part} or max_tokens.",
                param="max_tokens",
            )
        return wanted

    def _checked_ids(self, prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        if any(not issubclass(kind, int) or kind is bool for kind in set(map(type, ids))):
            raise InvalidRequestError("a prompt is a text or a list of integers", param="prompt")
        # one pass each in C: prompts have a hundred thousand tokens
        for value in (min(ids), max(ids)) if ids else ():
            if not 0 <= value < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {value} is outside the vocabulary of {self.vocab_size} tokens",
                    param="prompt",
                )
        return ids

    def _bad_word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Tokens of each word as it starts a text and, if that is one other token run of equal
        length, as it follows a space."""
        found: list[list[int]] = []
        for word in words:
            bare = word.lstrip()
            first = self.tokenizer.encode(bare, add_special_tokens=False)
            if not first:
                raise InvalidRequestError(
                    f"bad_words has no tokens for {word!r}", param="bad_words"
                )
            found.append(first)
            spaced = self.tokenizer.encode(" " + bare, add_special_tokens=False)
            if len(spaced) == len(first) and spaced[0] != first[0]:
                found.append(spaced)
        return found
