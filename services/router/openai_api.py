"""OpenAI request bodies to frozen, checked values. Unknown fields are ignored, as OpenAI does.

What is checked here needs no model: types, ranges, and which fields may stand together. Features
that a later version brings are refused by name, never ignored, since ignoring them would change the
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diptych.engine.request import MAX_CACHE_SALT_CHARS
from diptych.errors import InvalidRequestError, UnsupportedFeatureError
from diptych.sampling_params import SamplingParams
from diptych.services.router.json_body import JsonBody
from diptych.services.router.openai_prompts import chat_prompt, completion_prompts
from diptych.services.router.prompts import Prompt

COMPLETION_MAX_TOKENS = 16
_INT64 = 2**63

_UNSUPPORTED = (
    "use_beam_search",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "logits_processors",
    "logit_processors",
    "logprob_token_ids",
    "prompt_embeds",
    "tools",
    "functions",
    "documents",
    "audio",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "repetition_detection",
    "continue_final_message",
    "lora_request",
    "chat_template",
)
_UNSUPPORTED_UNLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """One call of `/v1/completions` or `/v1/chat/completions`.

    `sampling.max_tokens` is None where the rest of the context may be filled. `model` is None where
    the client named none.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    priority: int
    cache_salt: str | None


def parse_completion(body: bytes) -> ApiRequest:
    """A body of `/v1/completions`.

    Raises:
        InvalidRequestError, UnsupportedFeatureError: as the module says.
    """
    fields = JsonBody.parse(body)
    _refuse_unsupported(fields)
    special = fields.boolean("add_special_tokens")
    prompts = completion_prompts(fields.raw("prompt"), True if special is None else special)
    logprobs = fields.integer("logprobs")
    max_tokens = fields.integer("max_tokens")
    return _request(
        fields,
        prompts,
        logprobs=logprobs,
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        echo=fields.boolean("echo") or False,
    )


def parse_chat(body: bytes) -> ApiRequest:
    """A body of `/v1/chat/completions`.

    Raises:
        InvalidRequestError, UnsupportedFeatureError: as the module says.
    """
    fields = JsonBody.parse(body)
    _refuse_unsupported(fields)
    if fields.boolean("echo"):
        raise UnsupportedFeatureError("echo is not supported with messages", param="echo")
    max_tokens = fields.integer("max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens")
    return _request(
        fields,
        (chat_prompt(fields),),
        logprobs=_chat_logprobs(fields),
        max_tokens=max_tokens,
    )


def _request(
    fields: JsonBody,
    prompts: tuple[Prompt, ...],
    *,
    logprobs: int | None,
    max_tokens: int | None,
    echo: bool = False,
) -> ApiRequest:
    stream = fields.boolean("stream") or False
    include_usage, continuous_usage = _stream_options(fields, stream)
    sampling = parse_sampling(fields, logprobs=logprobs, max_tokens=max_tokens)
    if stream and sampling.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not available with stream", param="prompt_logprobs"
        )
    if echo and logprobs is not None and sampling.prompt_logprobs is None:
        sampling = sampling.replace(prompt_logprobs=logprobs)
    return ApiRequest(
        model=fields.string("model"),
        prompts=prompts,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.boolean("return_token_ids") or False,
        echo=echo,
        priority=fields.integer("priority") or 0,
        cache_salt=check_cache_salt(fields.string("cache_salt")),
    )


def parse_sampling(
    fields: JsonBody, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """The sampling fields of a body; absent ones take the defaults of `SamplingParams`."""
    readers: tuple[tuple[Callable[[str], Any], tuple[str, ...]], ...] = (
        (
            fields.number,
            (
                "temperature",
                "top_p",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            ),
        ),
        (fields.integer, ("n", "top_k", "min_tokens", "prompt_logprobs")),
        (
            fields.boolean,
            (
                "ignore_eos",
                "detokenize",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "include_stop_str_in_output",
            ),
        ),
        (fields.integers, ("stop_token_ids", "allowed_token_ids")),
        (fields.strings, ("bad_words",)),
        (fields.number_by_token, ("logit_bias",)),
    )
    values: dict[str, Any] = {
        name: value
        for read, names in readers
        for name in names
        if (value := read(name)) is not None
    }
    seed = fields.integer("seed", least=-_INT64, most=_INT64 - 1)
    stop = fields.raw("stop")
    stop = stop if isinstance(stop, str) else fields.strings("stop")
    return SamplingParams(**values, seed=seed, stop=stop, logprobs=logprobs, max_tokens=max_tokens)


def check_cache_salt(salt: str | None) -> str | None:
    """A salt of allowed length, or none."""
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
        )
    return salt


def _chat_logprobs(fields: JsonBody) -> int | None:
    """`logprobs` (a flag) and `top_logprobs` (a count) as one count."""
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs")
    if top is not None and not wanted and top != 0:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if top is not None and top < 0 and top != -1:
        raise InvalidRequestError("top_logprobs must be at least 0", param="top_logprobs")
    return (top or 0) if wanted else None


def _stream_options(fields: JsonBody, stream: bool) -> tuple[bool, bool]:
    """(a last chunk with usage, usage on every chunk)."""
    raw = fields.object("stream_options")
    if raw is None:
        return False, False
    if not stream:
        raise InvalidRequestError(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    options = JsonBody(raw)
    include = options.boolean("include_usage") or False
    return include, include and (options.boolean("continuous_usage_stats") or False)


def _refuse_unsupported(fields: JsonBody) -> None:
    """Name the first field that asks for what this version does not have."""
    response_format = fields.object("response_format")
    if response_format is not None and response_format.get("type") != "text":
        raise UnsupportedFeatureError(
            "response_format other than text is not supported in this version",
            param="response_format",
        )
    for name in (*_UNSUPPORTED, *_UNSUPPORTED_UNLESS):
        value = fields.raw(name)
        harmless = value is None or value is False or value in _UNSUPPORTED_UNLESS.get(name, ())
        if not harmless:
            raise UnsupportedFeatureError(f"{name} is not supported in this version", param=name)
