"""The requests of a load: random ones, conversations, a trace, or a file of one's own."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from diptych.bench.sharegpt import first_turns, usual_lengths
from diptych.errors import ConfigError
from diptych.text.tokenizer import Tokenizer

# tokens that a hash id of a trace stands for
TRACE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Load:
    """One request: its prompt as token ids or text, how many tokens it asks for, and, of a trace,
    when it came, in seconds."""

    prompt: list[int] | str
    output_len: int
    due_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths of random requests; each is drawn within `range_ratio` of its mean."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0


def random_loads(
    rng: random.Random, count: int, lengths: RandomLengths, vocab: range
) -> list[Load]:
    """Prompts of random token ids behind one common prefix."""

    def drawn(mean: int) -> int:
        low, high = mean * (1 - lengths.range_ratio), mean * (1 + lengths.range_ratio)
        return max(1, rng.randint(int(low), int(high)))

    prefix = rng.choices(vocab, k=lengths.prefix_len)
    return [
        Load(prefix + rng.choices(vocab, k=drawn(lengths.input_len)), drawn(lengths.output_len))
        for _ in range(count)
    ]


def sharegpt_loads(
    rng: random.Random, count: int, path: Path, tokenizer: Tokenizer, output_len: int | None
) -> list[Load]:
    """First turns of conversations, in random order, with the lengths of their answers."""
    turns = list(first_turns(path))
    rng.shuffle(turns)
    loads: list[Load] = []
    for prompt, answer in turns:
        if len(loads) == count:
            break
        found = usual_lengths(tokenizer, prompt, answer, output_len, 1 << 30)
        if found is not None:
            loads.append(Load(*found))
    return loads


def custom_loads(count: int, path: Path, output_len: int) -> list[Load]:
    """The lines of a JSONL file: `prompt` (text or token ids), and `output_tokens` if it has them.

    Raises:
        ConfigError: the file cannot be read, or a line has no prompt.
    """
    loads = []
    for number, row in enumerate(_json_lines(path), 1):
        prompt = row.get("prompt")
        if not prompt or not isinstance(prompt, str | list):
            raise ConfigError(f"{path}: line {number} has no prompt")
        loads.append(Load(prompt, int(row.get("output_tokens", output_len))))
        if len(loads) == count:
            break
    return loads


def trace_loads(
    count: int, path: Path, vocab: range, seed: int, length_scale: float = 1.0
) -> list[Load]:
    """The first requests of a trace, with their times from its first one on.

    A JSONL trace has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, each of
    which stands for the same 512 tokens wherever it occurs, so that prefixes are shared as they
    were. A CSV trace has `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. Both may be `.gz`.

    Args:
        length_scale: every length is multiplied by it.

    Raises:
        ConfigError: the file cannot be read, or a line lacks a field.
    """
    read = _csv_rows if ".csv" in path.suffixes else _hashed_rows
    loads: list[Load] = []
    block = max(1, round(TRACE_BLOCK * length_scale))
    blocks: dict[int, list[int]] = {}
    first_s = None
    for number, (at_s, input_len, output_len, hash_ids) in enumerate(read(path)):
        if number == count:
            break
        first_s = at_s if first_s is None else first_s
        length = max(1, round(input_len * length_scale))
        prompt: list[int] = []
        for name in hash_ids:
            if name not in blocks:
                blocks[name] = random.Random(f"{seed} {name}").choices(vocab, k=block)
            prompt += blocks[name]
        rest = max(0, length - len(prompt))
        prompt = prompt[:length] + random.Random(f"{seed} line {number}").choices(vocab, k=rest)
        loads.append(Load(prompt, max(1, round(output_len * length_scale)), at_s - first_s))
    return loads


_Row = tuple[float, int, int, list[int]]


def _hashed_rows(path: Path) -> Iterator[_Row]:
    for number, row in enumerate(_json_lines(path), 1):
        try:
            yield (
                row["timestamp"] / 1e3,
                int(row["input_length"]),
                int(row["output_length"]),
                row.get("hash_ids", []),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: line {number} is no request: {error!r}") from None


def _csv_rows(path: Path) -> Iterator[_Row]:
    for number, row in enumerate(csv.DictReader(_lines(path)), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), []
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: line {number} is no request: {error!r}") from None


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: line {number} is no object")
        yield row


def _lines(path: Path) -> Iterator[str]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
