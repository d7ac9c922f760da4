"""The hash chain that names KV: `h_i = H(namespace, h_{i-1}, tokens_i, extras_i)`.

Units are 16 tokens whatever the block size, so that unequal pools and the store share names. Every
field is typed and length-prefixed: no two different inputs give equal bytes to the hash. A partial
unit (the tail of a prompt) is hashed by the same rule, its length included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

UNIT_TOKENS = 16
PAGE_TOKENS = 64
HASH_BYTES = 32


def namespace_digest(fields: Sequence[tuple[str, str]]) -> bytes:
    """Digest of what makes KV compatible (weights manifest, dtypes, rope), from named values."""
    state = hashlib.sha256(b"diptych-kv-namespace-1")
    for name, value in fields:
        for text in (name, value):
            raw = text.encode()
            state.update(len(raw).to_bytes(8, "little") + raw)
    return state.digest()


def root_hash(namespace: bytes, cache_salt: str | None = None) -> bytes:
    """Parent of a request's first unit; a salt keeps its whole chain apart."""
    salt = b"" if cache_salt is None else cache_salt.encode()
    state = hashlib.sha256(b"diptych-kv-root-1")
    state.update(len(namespace).to_bytes(8, "little") + namespace)
    state.update((0 if cache_salt is None else 1).to_bytes(1, "little"))
    state.update(len(salt).to_bytes(8, "little") + salt)
    return state.digest()


def unit_hash(parent: bytes, token_ids: Sequence[int], extras: bytes = b"") -> bytes:
    """Name of the unit of `token_ids` (1..16 of them) after `parent`."""
    tokens = np.asarray(token_ids, dtype="<u4").tobytes()
    state = hashlib.sha256(parent)
    state.update(b"t" + len(tokens).to_bytes(4, "little") + tokens)
    state.update(b"x" + len(extras).to_bytes(4, "little") + extras)
    return state.digest()


class HashChain:
    """Hashes of the full units of a growing token list, computed once each."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.units: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the full units of `token_ids` (the whole list so far) that are not hashed yet."""
        for start in range(len(self.units) * UNIT_TOKENS, len(token_ids), UNIT_TOKENS):
            unit = token_ids[start : start + UNIT_TOKENS]
            if len(unit) < UNIT_TOKENS:
                return
            self.units.append(unit_hash(self.units[-1] if self.units else self.root, unit))

    def prefix_hash(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Name of the first `num_tokens` tokens, partial unit included; 0 gives the root."""
        self.extend(token_ids)
        full, rest = divmod(num_tokens, UNIT_TOKENS)
        parent = self.units[full - 1] if full else self.root
        if not rest:
            return parent
        return unit_hash(parent, token_ids[full * UNIT_TOKENS : num_tokens])

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Names of the full blocks, each the hash of its last unit."""
        step = block_size // UNIT_TOKENS
        return self.units[step - 1 :: step]
