"""The prompts of OpenAI request bodies to values."""

from __future__ import annotations

from typing import Any

from diptych.errors import InvalidRequestError, UnsupportedFeatureError
from diptych.services.router.json_body import JsonBody, is_integer
from diptych.services.router.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt

MAX_PROMPTS = 256
# names that the request sets by its own fields, or that are not the template's
_TEMPLATE_OWN = ("messages", "add_generation_prompt", "tools", "chat_template", "self", "params")


def completion_prompts(value: Any, special: bool) -> tuple[Prompt, ...]:
    """The prompts of a completion: a string, strings, token ids, or lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids",
            param="prompt",
        )
    if value and all(is_integer(item) for item in value):
        value = [value]
    if not value:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt must have at most {MAX_PROMPTS} items", param="prompt")
    return tuple(_completion_prompt(item, special) for item in value)


def _completion_prompt(item: Any, special: bool) -> Prompt:
    if not isinstance(item, str | list):
        raise InvalidRequestError(
            "each prompt must be a string or a list of token ids", param="prompt"
        )
    if not item:
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens=special)
    if not all(is_integer(token) for token in item):
        raise InvalidRequestError("prompt token ids must be integers", param="prompt")
    return TokensPrompt(tuple(item))


def chat_prompt(fields: JsonBody) -> ChatPrompt:
    if fields.boolean("add_special_tokens"):
        raise UnsupportedFeatureError(
            "add_special_tokens is not supported with messages: the chat template adds them",
            param="add_special_tokens",
        )
    messages = fields.raw("messages")
    if not isinstance(messages, list):
        raise InvalidRequestError("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    for index, message in enumerate(messages):
        _check_message(index, message)
    generation_prompt = fields.boolean("add_generation_prompt")
    variables = fields.object("chat_template_kwargs") or {}
    for name in _TEMPLATE_OWN:
        if name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs must not have {name}", param="chat_template_kwargs"
            )
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=True if generation_prompt is None else generation_prompt,
        template_variables=variables,
    )


def _check_message(index: int, message: Any) -> None:
    """The shape of a message; its content is checked where it is rendered."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object", param="messages")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"{where}.role must be a non-empty string", param="messages")
    if message.get("tool_calls"):
        raise UnsupportedFeatureError(
            f"{where}.tool_calls is not supported in this version", param="messages"
        )
    if not isinstance(message.get("content"), str | list):
        raise InvalidRequestError(
            f"{where}.content must be a string or a list of parts", param="messages"
        )
