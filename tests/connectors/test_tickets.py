"""Tickets are admitted once, from live routers, in the order of their epochs."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.connectors.tickets import (
    NonceWindow,
    TicketIssuer,
    TicketKeys,
    TicketVerifier,
    signed_bytes,
)
from diptych.errors import ConfigError, DuplicateRequestError, StaleTicketError
from diptych.proto import worker_pb2

ROUTER, WORKER = "router-1", "worker-1"


class StillClock:
    """Time stands at 100 s."""

    def monotonic(self) -> float:
        return 100.0

    def unix(self) -> float:
        return 0.0

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)

    def random(self) -> random.Random:
        return random.Random(0)

    def new_id(self) -> str:
        return "0"


def make_pair(window: int = 64) -> tuple[TicketIssuer, TicketVerifier]:
    keys = TicketKeys.drawn()
    verifier = TicketVerifier(keys, WORKER, StillClock(), window)
    verifier.router_joined(ROUTER)
    return TicketIssuer(keys, ROUTER), verifier


def issue(issuer: TicketIssuer, request_id: str = "a", epoch: int = 1) -> worker_pb2.Ticket:
    return issuer.issue(request_id, epoch=epoch, ttl_ms=2500, decode_incarnation=WORKER)


def test_a_ticket_is_admitted_and_its_time_counts_from_receipt() -> None:
    issuer, verifier = make_pair()
    admitted = verifier.admit(issue(issuer))
    assert (admitted.request_id, admitted.epoch, admitted.deadline_s) == ("a", 1, 102.5)


def test_the_same_ticket_again_is_a_duplicate() -> None:
    issuer, verifier = make_pair()
    ticket = issue(issuer)
    verifier.admit(ticket)
    with pytest.raises(DuplicateRequestError):
        verifier.admit(ticket)


def test_the_same_id_and_epoch_under_another_nonce_is_a_duplicate() -> None:
    issuer, verifier = make_pair()
    verifier.admit(issue(issuer))
    with pytest.raises(DuplicateRequestError):
        verifier.admit(issue(issuer))


def test_a_lower_epoch_is_refused_even_if_it_arrives_for_the_first_time() -> None:
    issuer, verifier = make_pair()
    first, second = issue(issuer, epoch=1), issue(issuer, epoch=2)
    verifier.admit(second)
    with pytest.raises(StaleTicketError, match="epoch 1"):
        verifier.admit(first)


def test_a_seen_nonce_is_refused_under_another_id() -> None:
    issuer, _ = make_pair()
    verifier = TicketVerifier(None, WORKER, StillClock())
    verifier.router_joined(ROUTER)
    ticket = issue(issuer)
    verifier.admit(ticket)
    ticket.request_id = "b"
    with pytest.raises(StaleTicketError, match="nonce"):
        verifier.admit(ticket)


def test_an_old_nonce_is_refused() -> None:
    issuer, verifier = make_pair(window=4)
    late = issue(issuer, "late")
    for n in range(4):
        verifier.admit(issue(issuer, f"r{n}"))
    with pytest.raises(StaleTicketError, match="too old"):
        verifier.admit(late)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "b"),
        ("router_incarnation", "router-2"),
        ("prefill_incarnation", WORKER),
        ("decode_incarnation", ""),
        ("epoch", 9),
        ("nonce", 9),
        ("ttl_ms", 9),
        ("key_id", "other"),
        ("signature", b"\0" * 32),
    ],
)
def test_a_changed_field_breaks_the_signature(field: str, value: object) -> None:
    issuer, verifier = make_pair()
    ticket = issue(issuer)
    setattr(ticket, field, value)
    with pytest.raises(StaleTicketError, match="signature"):
        verifier.admit(ticket)


def test_a_router_without_a_stream_is_refused_until_it_joins() -> None:
    issuer, verifier = make_pair()
    verifier.router_left(ROUTER)
    ticket = issue(issuer)
    with pytest.raises(StaleTicketError, match="no stream"):
        verifier.admit(ticket)
    verifier.router_joined(ROUTER)
    verifier.admit(ticket)


def test_a_router_that_returns_cannot_replay() -> None:
    issuer, verifier = make_pair()
    ticket = issue(issuer)
    verifier.admit(ticket)
    verifier.router_left(ROUTER)
    verifier.router_joined(ROUTER)
    with pytest.raises(DuplicateRequestError):
        verifier.admit(ticket)


def test_another_incarnation_of_the_worker_refuses() -> None:
    issuer, _ = make_pair()
    restarted = TicketVerifier(None, "worker-2", StillClock())
    restarted.router_joined(ROUTER)
    with pytest.raises(StaleTicketError, match="another incarnation"):
        restarted.admit(issue(issuer))


def test_gone_routers_are_forgotten_beyond_the_bound() -> None:
    verifier = TicketVerifier(None, WORKER, StillClock(), max_routers=3)
    for n in range(10):
        verifier.router_joined(f"r{n}")
        if n < 8:
            verifier.router_left(f"r{n}")
    assert len(verifier._routers) == 3
    assert {"r8", "r9"} <= set(verifier._routers)


@given(st.lists(st.integers(min_value=0, max_value=60), max_size=80), st.integers(1, 16))
def test_the_window_agrees_with_a_set(nonces: list[int], size: int) -> None:
    window, seen = NonceWindow(size), set[int]()
    for nonce in nonces:
        highest = max(seen, default=0)
        expected = nonce > 0 and nonce not in seen and nonce > highest - size
        assert window.is_new(nonce) == expected
        if expected:
            window.add(nonce)
            seen.add(nonce)


@given(st.data())
def test_whatever_the_order_each_attempt_starts_at_most_once_and_epochs_only_grow(
    data: st.DataObject,
) -> None:
    issuer, verifier = make_pair(window=8)
    epochs = dict.fromkeys("abcd", 0)
    tickets = []
    for request_id in data.draw(st.lists(st.sampled_from("abcd"), max_size=40)):
        epochs[request_id] += 1
        tickets.append(issue(issuer, request_id, epochs[request_id]))
    admitted: dict[str, int] = {}
    for ticket in data.draw(st.permutations(tickets * 2)):
        try:
            verifier.admit(ticket)
        except (StaleTicketError, DuplicateRequestError):
            continue
        assert ticket.epoch > admitted.get(ticket.request_id, 0)
        admitted[ticket.request_id] = ticket.epoch


def test_an_id_is_forgotten_only_once_its_nonces_are_too_old() -> None:
    issuer, verifier = make_pair(window=8)
    old, new = issue(issuer, "x", 1), issue(issuer, "x", 2)
    verifier.admit(new)
    for n in range(100):
        verifier.admit(issue(issuer, f"r{n}"))
    for ticket in (old, new):
        with pytest.raises(StaleTicketError):
            verifier.admit(ticket)
    assert len(verifier._routers[ROUTER].epochs) <= 16


def test_an_id_is_remembered_while_its_nonces_are_in_the_window() -> None:
    issuer, verifier = make_pair(window=8)
    old, new = issue(issuer, "x", 1), issue(issuer, "x", 2)
    verifier.admit(new)
    for n in range(6):
        verifier.admit(issue(issuer, f"r{n}"))
    with pytest.raises(StaleTicketError, match="epoch 1"):
        verifier.admit(old)


@given(st.text(max_size=5), st.text(max_size=5))
def test_no_two_tickets_share_signed_bytes(left: str, right: str) -> None:
    one = worker_pb2.Ticket(request_id=left + right)
    two = worker_pb2.Ticket(request_id=left, router_incarnation=right)
    assert (signed_bytes(one) == signed_bytes(two)) == (one == two)


def write_keys(path: Path, *names: str) -> None:
    path.write_text("# keys\n" + "".join(f"{name}:{name.encode().hex() * 16}\n" for name in names))
    os.utime(path, ns=(0, hash(names) % 10**15))


def test_keys_rotate_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "k1", "k2")
    issuer = TicketIssuer(TicketKeys.load(path), ROUTER)
    verifier = TicketVerifier(TicketKeys.load(path), WORKER, StillClock())
    verifier.router_joined(ROUTER)
    old = issue(issuer, "old")
    write_keys(path, "k2", "k1")
    new = issue(issuer, "new")
    assert (old.key_id, new.key_id) == ("k1", "k2")
    verifier.admit(old)
    verifier.admit(new)
    stale = issue(issuer, "stale")
    write_keys(path, "k3")
    with pytest.raises(StaleTicketError, match="signature"):
        verifier.admit(stale)


def test_a_file_that_breaks_later_keeps_the_old_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "k1")
    keys = TicketKeys.load(path)
    ticket = issue(TicketIssuer(keys, ROUTER))
    path.write_text("nonsense")
    assert keys.verify(ticket)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k1",
        "k1:xyz",
        "k1:00ff",
        ":" + "00" * 32,
        "\n".join(f"{i}:" + "00" * 32 for i in range(3)),
    ],
)
def test_a_bad_key_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="keys"):
        TicketKeys.load(path)


def test_a_missing_key_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TicketKeys.load(tmp_path / "none")
