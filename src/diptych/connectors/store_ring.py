"""Which nodes hold a key: rendezvous hashing. Pure code.

Every node has a score for every key; the key belongs to the highest. A node that joins takes over
the keys for which it scores highest and no others; one that leaves passes each of its keys to the
next in that key's own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash


def ranked(key: bytes, node_ids: Iterable[str]) -> list[str]:
    """The nodes in the key's order, its owner first."""
    return sorted(
        node_ids, key=lambda node_id: (_score(node_id.encode(), key), node_id), reverse=True
    )


def owner(key: bytes, node_ids: Sequence[str]) -> str:
    """The key's first node. At least one is there."""
    if len(node_ids) == 1:
        return node_ids[0]
    return max(node_ids, key=lambda node_id: (_score(node_id.encode(), key), node_id))


def _score(node: bytes, key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(node))
