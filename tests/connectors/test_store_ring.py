"""Rendezvous hashing: fair, and nothing moves that need not."""

from __future__ import annotations

import hashlib
from collections import Counter

from diptych.connectors.store_breaker import CircuitBreaker
from diptych.connectors.store_ring import owner, ranked

KEYS = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(4000)]
NODES = ["a", "b", "c", "d"]


def test_every_node_owns_about_its_share() -> None:
    counts = Counter(owner(key, NODES) for key in KEYS)
    assert set(counts) == set(NODES)
    assert max(counts.values()) < 1.2 * len(KEYS) / len(NODES)


def test_the_owner_is_the_first_in_order_whatever_the_order_of_the_nodes() -> None:
    for key in KEYS[:200]:
        order = ranked(key, NODES)
        assert sorted(order) == NODES
        assert order == ranked(key, NODES[::-1])
        assert owner(key, NODES) == order[0]


def test_a_node_that_joins_takes_only_its_share() -> None:
    moved = [key for key in KEYS if owner(key, [*NODES, "e"]) != owner(key, NODES)]
    assert {owner(key, [*NODES, "e"]) for key in moved} == {"e"}
    assert len(moved) < 1.2 * len(KEYS) / 5


def test_a_node_that_leaves_passes_each_key_to_the_next_in_its_order() -> None:
    for key in KEYS[:500]:
        order = ranked(key, NODES)
        rest = [node for node in NODES if node != order[0]]
        assert owner(key, rest) == order[1]


def test_a_breaker_holds_longer_with_every_failure_and_forgets_with_a_success() -> None:
    time = [0.0]
    breaker = CircuitBreaker(lambda: time[0])
    assert not breaker.is_open
    assert [breaker.failed() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    time[0] = 7.9
    assert breaker.is_open
    time[0] = 8.0
    assert not breaker.is_open
    breaker.worked()
    assert breaker.failed() == 0.5
    breaker.reset()
    assert not breaker.is_open
