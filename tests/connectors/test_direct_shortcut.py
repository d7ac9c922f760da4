"""Engines of one host speak past their services, and only with peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from diptych.connectors.direct_shortcut import MAX_BYTES, MAX_REFUSED, REFUSED_S, Shortcut
from diptych.connectors.store_wire import socket_name


@pytest.fixture
def pair() -> Iterator[tuple[Shortcut, Shortcut]]:
    """Two engines, that have met."""
    with ExitStack() as stack:
        one, other = Shortcut(), Shortcut()
        stack.callback(one.close)
        stack.callback(other.close)
        one.meet("other", other.card)
        other.meet("one", one.card)
        yield one, other


def test_messages_arrive_whole_and_in_order(pair: tuple[Shortcut, Shortcut]) -> None:
    one, other = pair
    bodies = [b"", b"a", b"b" * MAX_BYTES]
    for body in bodies:
        assert one.send("other", body)
    assert [other.receive() for _ in bodies] == [("one", body) for body in bodies]
    assert other.receive() is None
    assert other.send("one", b"back")
    assert one.receive() == ("other", b"back")


def test_what_does_not_fit_goes_another_way(pair: tuple[Shortcut, Shortcut]) -> None:
    one, other = pair
    assert not one.send("other", b"x" * (MAX_BYTES + 1))
    assert not one.send("nobody", b"x")
    count = 0
    while one.send("other", b"x" * 100):  # nobody reads
        count += 1
        assert count < 100_000
    assert count
    while other.receive() is not None:
        count -= 1
    assert not count
    assert one.send("other", b"x")


def test_strangers_are_not_heard(pair: tuple[Shortcut, Shortcut]) -> None:
    one, other = pair
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        target = socket_name(other.card.address)
        for header in (
            b"",
            other.card.token,
            bytes(len(one.card.token)) + one.card.name,  # a wrong token
            other.card.token + bytes(len(one.card.name)),  # somebody who was never met
        ):
            stranger.sendto(header + b"x", target)
            assert other.receive() is None
    assert other.num_refused == 4
    other.part("one")
    assert one.send("other", b"x")
    assert other.receive() is None


def test_who_is_elsewhere_or_gone_is_not_spoken_to(pair: tuple[Shortcut, Shortcut]) -> None:
    one, other = pair
    one.meet("far", msgspec.structs.replace(other.card, boot_id="another host"))
    one.meet("old", None)
    assert not one.send("far", b"x")
    assert not one.send("old", b"x")
    other.close()
    assert not one.send("other", b"x")
    assert not one.send("other", b"x")
    assert not one.num_sent


def test_strangers_without_end_close_it_and_peers_take_the_stream() -> None:
    now = [0.0]
    with ExitStack() as stack:
        one, other = Shortcut(), Shortcut(lambda: now[0])
        stack.callback(one.close)
        stack.callback(other.close)
        one.meet("other", other.card)
        other.meet("one", one.card)
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        target = socket_name(other.card.address)
        for count in range(2 * MAX_REFUSED):
            if count == MAX_REFUSED:
                now[0] += REFUSED_S  # so far it was slow enough
            stranger.sendto(b"x", target)
            assert other.receive() is None
        assert one.send("other", b"still heard")
        assert other.receive() == ("one", b"still heard")
        stranger.sendto(b"x", target)
        assert other.receive() is None
        assert other.closed
        assert other.receive() is None
        assert not other.send("one", b"x")
        assert not one.send("other", b"x")
        other.meet("one", one.card)
        assert not other.send("one", b"x")


@pytest.mark.parametrize("order", [("liar", "one"), ("one", "liar")])
def test_no_peer_is_heard_as_another_whose_name_it_claims(order: tuple[str, str]) -> None:
    with ExitStack() as stack:
        one, other = Shortcut(), Shortcut()
        stack.callback(one.close)
        stack.callback(other.close)
        one.meet("other", other.card)
        for peer in order:
            other.meet(peer, one.card)
        assert other.closed
        assert not one.send("other", b"x")  # and its message goes by the stream
        other.part("liar")


def test_a_peer_that_is_met_again_keeps_its_name(pair: tuple[Shortcut, Shortcut]) -> None:
    one, other = pair
    other.meet("one", one.card)
    assert one.send("other", b"x")
    assert other.receive() == ("one", b"x")
