"""One prompt in one of its three forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, without a template."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, put through the model's chat template."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokensPrompt | ChatPrompt
