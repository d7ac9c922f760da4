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
    """How many answers are equal, and what comes before the first difference: of each answer, and
    as a share of all.

    In bfloat16 one answer is another in another batch, or behind a cached prefix, as soon as two
    tokens are nearly as likely; where KV is wrong, answers differ from the first token on that was
    sampled with it. Equal answers can be asked of float32, and of requests that come one by one to
    systems whose caches hold nothing of them (`compare_digests`).

    Only pairs in which both ended well count.
    """
    pairs = [
        (one, two)
        for one, two in zip(answers, again, strict=False)
        if one.error is None and two.error is None
    ]
    equal = sum(digest(one) == digest(two) for one, two in pairs)
    common = [_common(one, two) for one, two in pairs]
    shares = [same / longest if longest else 1.0 for same, longest in common]
    return {
        "answers_checked": len(pairs),
        "answers_equal": equal,
        "tokens_before_difference_share": sum(shares) / len(shares) if shares else None,
        "tokens_before_difference": [same for same, _ in common],
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


def _common(one: Answer, two: Answer) -> tuple[int, int]:
    """Equal tokens before the first that differs, of how many; characters without ids."""
    first: Sequence[Any] = one.token_ids or "".join(one.text)
    second: Sequence[Any] = two.token_ids or "".join(two.text)
    longest = max(len(first), len(second))
    same = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        same += 1
    return same, longest
