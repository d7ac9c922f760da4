"""How tokens are chosen: the fields, defaults and rules that users of this field know.

No torch here: the router, the services and `LLM` share this file.
"""

from __future__ import annotations

import math
import sys
from copy import copy
from typing import Any

import msgspec

from diptych.errors import InvalidRequestError, UnsupportedFeatureError

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 1e-2
MAX_LOGPROBS = 20
# what the sampler has room for, per request
MAX_LOGIT_EDITS = 1024
MAX_BAD_WORD_TOKENS = 129
MAX_BAD_WORDS_TOKENS = 1024


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling of one request.

    Raises:
        InvalidRequestError: a value is outside its range.
        UnsupportedFeatureError: the value is valid elsewhere, not in this version.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_lists()
        self.stop = list(self.stop or [])
        self.stop_token_ids = sorted(set(self.stop_token_ids or []))
        self.bad_words = list(self.bad_words or [])
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        self._check_types()
        self._check_ranges()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < LEAST_TEMPERATURE:
            self.temperature = LEAST_TEMPERATURE

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with other values."""
        return msgspec.structs.replace(self, **changes)

    def completed(
        self, *, seed: int, max_tokens: int, bad_words_token_ids: list[list[int]] | None
    ) -> SamplingParams:
        """A copy with what was left open; only what these may break is checked again.

        Raises:
            InvalidRequestError: fewer tokens are possible than at least wanted.
        """
        done = copy(self)
        done.seed, done.max_tokens = seed, max_tokens
        done.bad_words_token_ids = bad_words_token_ids
        done._check_least_tokens()
        return done

    def check_against_model(self, *, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Check what depends on the model.

        Raises:
            InvalidRequestError: an id is outside the vocabulary, or too many logprobs.
        """
        ids: list[tuple[str, list[int]]] = [
            ("stop_token_ids", self.stop_token_ids or []),
            ("allowed_token_ids", self.allowed_token_ids or []),
            ("logit_bias", list(self.logit_bias or {})),
            ("bad_words_token_ids", [i for word in self.bad_words_token_ids or () for i in word]),
        ]
        for name, values in ids:
            for value in values:
                if not 0 <= value < vocab_size:
                    raise InvalidRequestError(
                        f"{name} contains {value}, outside the vocabulary of {vocab_size} tokens",
                        param=name,
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            wanted = vocab_size if count == -1 else count or 0
            limit = vocab_size if max_logprobs == -1 else max_logprobs
            if wanted > limit:
                raise InvalidRequestError(
                    f"{name} must be at most {limit}, got {count}", param=name
                )

    def check_logit_edits(self, num_eos_tokens: int) -> None:
        """Check that the sampler has room for what changes the logits of certain tokens; words
        have been tokenised.

        Raises:
            InvalidRequestError: there are too many, or a word is too long.
        """
        words = self.bad_words_token_ids or []
        stops = len(self.stop_token_ids or []) + num_eos_tokens if self.min_tokens else 0
        count = len(words) + len(self.logit_bias or {}) + stops
        if count > MAX_LOGIT_EDITS:
            raise InvalidRequestError(
                f"logit_bias, bad_words and, with min_tokens, stop tokens have {count} tokens or "
                f"words together; at most {MAX_LOGIT_EDITS} are possible",
                param="bad_words" if words else "logit_bias",
            )
        longest = max(map(len, words), default=0)
        total = sum(len(word) - 1 for word in words)
        if longest > MAX_BAD_WORD_TOKENS or total > MAX_BAD_WORDS_TOKENS:
            raise InvalidRequestError(
                f"bad_words has a word of {longest} tokens and {total} tokens before last ones; "
                f"at most {MAX_BAD_WORD_TOKENS} and {MAX_BAD_WORDS_TOKENS} are possible",
                param="bad_words",
            )

    def _check_lists(self) -> None:
        for name, holds, what in (
            ("stop", _is_word, "non-empty strings"),
            ("bad_words", _is_word, "non-empty strings"),
            ("stop_token_ids", _is_int, "integers"),
            ("allowed_token_ids", _is_int, "integers"),
            ("bad_words_token_ids", _is_sequence, "lists of integers"),
        ):
            values = getattr(self, name)
            _require(name, values is None or _is_sequence(values), f"a list of {what}")
            _require(name, all(map(holds, values or ())), f"a list of {what}")
        for word in self.bad_words_token_ids or ():
            filled = bool(word) and all(map(_is_int, word))
            _require("bad_words_token_ids", filled, "a list of non-empty lists of integers")

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _require(name, _is_int(getattr(self, name)), "an integer")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(name, value is None or _is_int(value), "an integer")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            _require(name, _is_finite(value), "a finite number")

    def _check_least_tokens(self) -> None:
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _require("min_tokens", fits, "at most max_tokens")

    def _check_ranges(self) -> None:
        if self.n > 1:
            raise UnsupportedFeatureError(f"n must be 1 in this version, got {self.n}", param="n")
        _require("n", self.n >= 1, "at least 1")
        _require("temperature", 0.0 <= self.temperature <= 2.0, "in [0, 2]")
        _require("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _require("top_k", self.top_k >= 0, "-1, 0 or a positive integer")
        _require("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        _require("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]")
        _require("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]")
        _require("repetition_penalty", self.repetition_penalty > 0.0, "above 0")
        _require("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        _require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens >= 0, "at least 0")
        self._check_least_tokens()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(name, value is None or value >= -1, "-1, 0 or a positive integer")
        _require("stop", self.detokenize or not self.stop, "empty when detokenize is False")
        allowed = self.allowed_token_ids
        _require("allowed_token_ids", allowed is None or len(allowed) > 0, "non-empty")
        if self.logit_bias is not None:
            try:
                bias = {int(k): float(v) for k, v in self.logit_bias.items()}
            except (AttributeError, OverflowError, TypeError, ValueError):
                bias = {0: math.nan}
            _require("logit_bias", all(map(math.isfinite, bias.values())), "a map of id to number")
            self.logit_bias = {k: min(100.0, max(-100.0, v)) for k, v in bias.items()}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset)


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float holds: `math.isfinite` fails on wider integers."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def _require(name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{name} must be {rule}", param=name)
