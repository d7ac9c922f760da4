"""What a ladder measures, as its flags name it: `8@1k`, `16x1024`, `8x32+128`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from diptych.errors import ConfigError


class Point(NamedTuple):
    """`batch` requests of `length` prompt tokens and, for whole batches, `output` tokens."""

    batch: int
    length: int
    output: int = 1


def parse_point(text: str) -> Point:
    """`8@1k`, `16x1024` or `8x32+128`; `k` is 1,024.

    Raises:
        ConfigError: it is something else.
    """
    match = re.fullmatch(r"(\d+)[@x](\d+)(k?)(?:\+(\d+))?", text)
    if match is None or 0 in (int(match[1]), int(match[2]), int(match[4] or 1)):
        raise ConfigError(f"{text!r} is no point: write 8@1k, 16x1024 or 8x32+128")
    return Point(int(match[1]), int(match[2]) * (1024 if match[3] else 1), int(match[4] or 1))


def parse_points(texts: Sequence[str]) -> list[Point]:
    """Points of a flag, which may be given as several values or as one with commas."""
    return [parse_point(part) for text in texts for part in text.replace(",", " ").split()]
