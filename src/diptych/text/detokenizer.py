"""Token ids to text while they arrive, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from diptych.text.stop_string import StopString
from diptych.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
_MOST_UNREAD = 8  # a character has four bytes at most


class TextDelta(NamedTuple):
    """What an `append` gave: new text, the stop string that ended it, tokens that count."""

    text: str
    stop: str | None
    num_tokens: int


class TokenStream(Protocol):
    """Turns tokens into whole characters."""

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; an unfinished character is kept back."""
        ...

    def flush(self) -> str:
        """What was kept back, as U+FFFD where it is no whole character."""
        ...


class IncrementalDetokenizer:
    """The text of one output.

    Text is given out as soon as it is whole UTF-8 and cannot be the start of a stop string: at most
    `max(len(stop)) - 1` characters are held back. Of several stop strings the one that is complete
    first wins. Text made up to `min_tokens` never stops the output.

    The pieces of `append` and the last one of `finish`, joined, are `text`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = token_stream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = [StopString(s) for s in stop if s]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._released: list[str] = []
        self._pending = ""  # holds every place where a stop string may have begun
        self._num_tokens = 0
        self._stopped: str | None = None

    @property
    def text(self) -> str:
        """All text so far that `append` and `finish` gave out."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    @property
    def num_tokens(self) -> int:
        """Tokens that count: none past the one that completed a stop string."""
        return self._num_tokens

    def append(self, token_ids: Sequence[int], *, silent_last: bool = False) -> TextDelta:
        """Take new tokens. `silent_last`: the last is a stop token, which counts but has no text.

        After a stop string nothing more is taken.
        """
        taken = 0
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            if self._stopped is not None:
                break
            taken += 1
            self._num_tokens += 1
            if not (silent_last and index == last and not self._include_stop):
                self._take(self._stream.push(token_id))
        return TextDelta(self._release(self._num_held()), self._stopped, taken)

    def finish(self) -> TextDelta:
        """The output is over: what was held back comes out, after a last look for stop strings."""
        if self._stopped is None:
            self._take(self._stream.flush())
        return TextDelta(self._release(0), self._stopped, 0)

    def _take(self, piece: str) -> None:
        counts = self._num_tokens > self._min_tokens
        for index, char in enumerate(piece if self._stops else ""):
            complete = [stop.text for stop in self._stops if stop.push(char)]
            if complete and counts:
                self._stopped = max(complete, key=len)
                kept = self._pending + piece[: index + 1]
                self._pending = kept if self._include_stop else kept[: -len(self._stopped)]
                return
        self._pending += piece

    def _num_held(self) -> int:
        """Length of the longest end of the pending text that is the start of a stop string."""
        if self._stopped is not None:
            return 0
        return max((stop.num_matched for stop in self._stops), default=0)

    def _release(self, num_held: int) -> str:
        cut = len(self._pending) - num_held
        text, self._pending = self._pending[:cut], self._pending[cut:]
        if text:
            self._released.append(text)
        return text


def token_stream(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
) -> TokenStream:
    """The stream that fits the tokenizer, placed after the prompt."""
    context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
    if tokenizer.is_bytewise:
        return _ByteStream(tokenizer, context, skip_special_tokens)
    return _DecodeStream(tokenizer, context, skip_special_tokens)


class _ByteStream:
    """For vocabularies whose text is the concatenation of their bytes: constant work a token."""

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in context:
            self._decoder.decode(self._token_bytes(token_id))

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _DecodeStream:
    """For any other tokenizer: decodes a window again and gives out what is new in it."""

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = context
        self._num_read = len(context)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        unfinished = text.endswith("\ufffd") and len(self._window) - self._num_read < _MOST_UNREAD
        if not text or unfinished:
            return ""
        self._window = self._window[max(0, self._num_read - _CONTEXT_TOKENS) :]
        self._num_read = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._num_read = len(self._window)
        return text

    def _new_text(self) -> str:
        old, new = self._decode(self._window[: self._num_read]), self._decode(self._window)
        return new[len(old) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
