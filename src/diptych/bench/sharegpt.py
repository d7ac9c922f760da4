"""Conversations of the ShareGPT form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from diptych.errors import ConfigError
from diptych.text.tokenizer import Tokenizer

MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048


def first_turns(path: Path) -> Iterator[tuple[str, str]]:
    """First question and answer of each conversation.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for entry in conversations:
        turns = entry.get("conversations", entry.get("conversation", []))
        if len(turns) >= 2:
            yield turns[0]["value"], turns[1]["value"]


def usual_lengths(
    tokenizer: Tokenizer, prompt: str, answer: str, output_len: int | None, max_model_len: int
) -> tuple[list[int], int] | None:
    """The prompt's ids and how long the answer is to be; None where a length is outside what is
    usual."""
    ids = tokenizer.encode(prompt)
    length = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
    fits = len(ids) <= MAX_PROMPT_LEN and len(ids) + length <= min(MAX_TOTAL_LEN, max_model_len)
    return (ids, length) if min(len(ids), length) >= MIN_LEN and fits else None
