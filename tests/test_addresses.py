import socket

import pytest

from diptych import addresses
from diptych.addresses import reachable_address
from diptych.errors import AddressError

REMOTE = "redis://directory.example:6379/0"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names resolve to an address that has a route, as far as there is a network."""
    look_up = socket.getaddrinfo

    def resolve(host: str, *rest: object, **more: object) -> object:
        return look_up("192.0.2.9" if host == "directory.example" else host, *rest, **more)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)


def has_network() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
        return not str(probe.getsockname()[0]).startswith("127.")


def test_what_the_operator_says_is_told() -> None:
    assert reachable_address("0.0.0.0", 1, "worker-3.llm:9000", REMOTE) == "worker-3.llm:9000"


def test_a_local_deployment_tells_local_addresses() -> None:
    assert reachable_address("127.0.0.1", 9000, None) == "127.0.0.1:9000"
    assert reachable_address("::1", 9000, None, "redis://[::1]:6379") == "[::1]:9000"
    assert reachable_address("127.0.0.1", 9000, None, "redis://localhost:1") == "127.0.0.1:9000"


def test_loopback_is_told_to_nobody_elsewhere(remote: None) -> None:
    with pytest.raises(AddressError, match="give --advertise-address") as caught:
        reachable_address("127.0.0.1", 9000, None, REMOTE)
    assert caught.value.param == "advertise_address"
    assert caught.value.code == "no_routable_address"


def test_a_wildcard_becomes_the_address_of_a_real_interface(remote: None) -> None:
    if not has_network():
        pytest.skip("this machine has no network but loopback")
    for directory in (None, REMOTE):
        host, _, port = reachable_address("0.0.0.0", 9000, None, directory).rpartition(":")
        assert port == "9000"
        assert not host.startswith("127.")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_a_wildcard_without_a_network_refuses_to_start(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(addresses.socket, "getaddrinfo", unreachable)
    with pytest.raises(AddressError, match="others cannot reach this process"):
        reachable_address(host, 9000, None)
