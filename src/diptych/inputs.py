"""The forms that a prompt may have in `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from diptych.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class ParsedPrompt(TypedDict):
    """A prompt in one form."""

    prompt: str | list[int]
    cache_salt: str | None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """One prompt in any form.

    Raises:
        InvalidRequestError: it has none of the forms.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": None}
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - _KEYS
        if unknown:
            raise InvalidRequestError(
                f"a prompt cannot have {', '.join(sorted(map(str, unknown)))} in this version",
                param="prompt",
            )
        value = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(value, str) or _is_ids(value):
            return {"prompt": value, "cache_salt": prompt.get("cache_salt")}
    elif _is_ids(prompt):
        return {"prompt": list(prompt), "cache_salt": None}
    raise InvalidRequestError(
        'a prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}',
        param="prompt",
    )


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """One prompt or a list of them.

    Raises:
        InvalidRequestError: one of them has none of the forms.
    """
    one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence)
    if one or (prompts and isinstance(prompts[0], int)):
        return [parse_prompt(prompts)]
    return [parse_prompt(prompt) for prompt in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
