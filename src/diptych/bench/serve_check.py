"""Whether answers are the same as those of another run of the same requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from diptych.bench.serve_client import Answer


def digest(answer: Answer) -> str | None:
    """A name of what was answered, by which two runs are compared; None of a failure."""
    if answer.error is not None:
        return None
    content = ",".join(map(str, answer.token_ids)) or "".join(answer.text)
    return xxhash.xxh3_128_hexdigest(content.encode())


def compare(answers: Sequence[Answer], again: Sequence[Answer]) -> dict[str, Any]:
    """How many answers are equal, and which share of the tokens comes before the first difference.

    Only pairs in which both ended well count.
    """
    pairs = [
        (one, two)
        for one, two in zip(answers, again, strict=False)
        if one.error is None and two.error is None
    ]
    equal = sum(digest(one) == digest(two) for one, two in pairs)
    shares = [_common(one, two) for one, two in pairs]
    return {
        "answers_checked": len(pairs),
        "answers_equal": equal,
        "tokens_before_difference_share": sum(shares) / len(shares) if shares else None,
    }


def compare_digests(answers: Sequence[Answer], digests: Sequence[str | None]) -> dict[str, Any]:
    """How many answers are those that an earlier run had."""
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(map(digest, answers), digests, strict=False)
        if mine and theirs
    ]
    return {
        "reference_checked": len(pairs),
        "reference_equal": sum(mine == theirs for mine, theirs in pairs),
    }


def _common(one: Answer, two: Answer) -> float:
    """Share of equal tokens before the first that differs; of characters where there are no ids."""
    first: Sequence[Any] = one.token_ids or "".join(one.text)
    second: Sequence[Any] = two.token_ids or "".join(two.text)
    longest = max(len(first), len(second))
    same = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        same += 1
    return same / longest if longest else 1.0
