"""Text to token ids and back, on the `tokenizers` library; no torch here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tokenizers

from diptych.errors import InvalidRequestError, ModelLoadError
from diptych.text.token_bytes import TokenBytes, is_bytewise, token_bytes_of

# batches here have one text: no thread pool, and no warning when the process forks
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads: nothing changes after loading.

    What is added around a text (BOS, EOS) is what `tokenizer.json` and the fields `add_bos_token`
    and `add_eos_token` of `tokenizer_config.json` say.
    """

    def __init__(self, inner: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> None:
        config = config or {}
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        decoder = json.loads(inner.decoder.__getstate__()) if inner.decoder else None
        self._bytes: TokenBytes = token_bytes_of(decoder)
        self.is_bytewise: bool = is_bytewise(decoder)
        self._pieces: dict[int, bytes] = {}
        added = inner.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        self._add_bos: bool | None = config.get("add_bos_token")
        self._add_eos: bool | None = config.get("add_eos_token")
        self.config = config

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer in `tokenizer.json` of a model directory.

        Raises:
            ModelLoadError: a file is missing or broken.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise ModelLoadError(f"{file} does not exist; a tokenizer.json is needed")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
        return cls(inner, read_tokenizer_config(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequestError: the text has code points that UTF-8 cannot hold (lone surrogates).
        """
        try:
            # the batch form lets other threads run meanwhile; `encode` holds the GIL
            batch = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("the prompt is not valid UTF-8 text", param="prompt") from (
                error
            )
        ids: list[int] = batch[0].ids
        return self._with_ends(ids) if add_special_tokens else ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token are left out."""
        text: str = self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, which need not be whole characters; empty if there is none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            piece = self._bytes(token) if token is not None else b""
            self._pieces[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; what is not whole UTF-8 shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _with_ends(self, ids: list[int]) -> list[int]:
        """Apply `add_bos_token` and `add_eos_token` where tokenizer.json does otherwise."""
        bos, eos = self.bos_token_id, self.eos_token_id
        if bos is not None and self._add_bos is not None:
            has = ids[:1] == [bos]
            if self._add_bos and not has:
                ids = [bos, *ids]
            elif not self._add_bos and has and self._adds_bos_itself:
                ids = ids[1:]
        if self._add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids

    @property
    def _adds_bos_itself(self) -> bool:
        first: list[int] = self._inner.encode("", add_special_tokens=True).ids[:1]
        return first == [self.bos_token_id]

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._inner.token_to_id(token)


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a model directory; empty if there is none.

    Raises:
        ModelLoadError: the file is not a JSON object.
    """
    file = path / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return value


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
