"""What bytes a token stands for, read from the `decoder` of a tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

TokenBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def token_bytes_of(decoder: dict[str, Any] | None) -> TokenBytes:
    """How this tokenizer turns one token of its vocabulary into bytes.

    Byte-level vocabularies spell each byte as one printable character; SentencePiece-like ones
    spell a space as U+2581 and bytes without a token as `<0xNN>`. Others hold plain text.
    """
    steps = _steps(decoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = [
        (str(step.get("pattern", {}).get("String", "")), str(step.get("content", "")))
        for step in steps
        if step.get("type") == "Replace"
    ]
    if "Metaspace" in kinds:
        replaced.append(("\u2581", " "))
    return _plain([pair for pair in replaced if pair[0]], byte_fallback="ByteFallback" in kinds)


def is_bytewise(decoder: dict[str, Any] | None) -> bool:
    """Whether the text of tokens is the concatenation of their bytes, past the first token."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    regular = all("String" in s.get("pattern", {}) for s in steps if s.get("type") == "Replace")
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    return bool(kinds) and regular and known.issuperset(kinds)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _byte_table() -> dict[str, int]:
    """The printable character of each byte: itself where it prints, else from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(prints)]
    table = {chr(byte): byte for byte in prints}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token, spelled as it is
        return token.encode("utf-8")


def _plain(replaced: list[tuple[str, str]], *, byte_fallback: bool) -> TokenBytes:
    def convert(token: str) -> bytes:
        match = _BYTE_TOKEN.match(token) if byte_fallback else None
        if match:
            return bytes([int(match.group(1), 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode("utf-8")

    return convert
