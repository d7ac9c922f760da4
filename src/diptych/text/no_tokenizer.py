"""In the place of a tokenizer where prompts and answers are token ids only."""

from __future__ import annotations

import tokenizers

from diptych.errors import InvalidRequestError
from diptych.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Knows no token, and refuses text."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Always raises InvalidRequestError."""
        raise InvalidRequestError("there is no tokenizer: give token ids, not text")
