"""A network partition between prefill and decode, in network namespaces: dropped, not refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.clients import QUESTIONS
from tests.faults.deployment import Deployment, Shape

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

NET = "10.213"
QUESTION = QUESTIONS[2]
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 20)
except ConnectionRefusedError:
    pass
except OSError:
    sys.exit(1)
"""


def command(*words: str) -> None:
    """Run it.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(words, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network of its own, joined to ours by one pair of interfaces."""

    name: str
    index: int

    @property
    def address(self) -> str:
        return f"{NET}.{self.index}.2"

    @property
    def ours(self) -> str:
        return f"{NET}.{self.index}.1"

    def make(self) -> None:
        near, far = f"dpt{self.index}a", f"dpt{self.index}b"
        command("ip", "netns", "add", self.name)
        command("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        command("ip", "link", "set", far, "netns", self.name)
        command("ip", "addr", "add", f"{self.ours}/24", "dev", near)
        command("ip", "link", "set", near, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", far)
        self.run("ip", "link", "set", far, "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "route", "add", "default", "via", self.ours)

    def run(self, *words: str) -> None:
        command("ip", "netns", "exec", self.name, *words)

    def drop(self, add: bool, address: str) -> None:
        """Drop (or no longer) whatever comes from or goes to an address."""
        change = "-A" if add else "-D"
        self.run("iptables", change, "INPUT", "-s", address, "-j", "DROP")
        self.run("iptables", change, "OUTPUT", "-d", address, "-j", "DROP")

    def limit(self, rate: str) -> None:
        """What leaves it goes no faster from now on (a token bucket)."""
        bucket = ("rate", rate, "burst", "16kb", "latency", "400ms")
        self.run("tc", "qdisc", "add", "dev", f"dpt{self.index}b", "root", "tbf", *bucket)

    def unlimit(self) -> None:
        self.run("tc", "qdisc", "del", "dev", f"dpt{self.index}b", "root")

    def reaches(self, address: str) -> bool:
        """Whether packets come through to an address: nobody listens there, and says so."""
        python = (sys.executable, "-P", "-c", PROBE, address)
        return not subprocess.run(
            ["ip", "netns", "exec", self.name, *python], check=False
        ).returncode

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"dpt{self.index}a"], check=False, capture_output=True)


@pytest.fixture(scope="module")
def tools() -> Iterator[None]:
    """Programs of the administrator are found though the path names a user's only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")
        yield


@pytest.fixture(scope="module")
def namespaces(tools: None) -> Iterator[dict[str, Namespace]]:
    """That of prefill and that of decode, which reach one another through ours."""
    made = {"prefill": Namespace("diptych-p", 1), "decode": Namespace("diptych-d", 2)}
    with ExitStack() as stack:
        try:
            for each in made.values():
                each.remove()
                stack.callback(each.remove)
                each.make()
            made["decode"].drop(True, "192.0.2.1")
            made["decode"].drop(False, "192.0.2.1")
            stack.callback(FORWARD.write_text, FORWARD.read_text())
            FORWARD.write_text("1")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces or packet filters may be made here: {said(error)}")
        if not made["prefill"].reaches(made["decode"].address):
            pytest.skip("nothing is forwarded between network namespaces here")
        yield made


def said(error: Exception) -> str:
    """What a command that failed wrote, or why it could not be run."""
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr.decode().strip() or error)
    return str(error)


@pytest.fixture(scope="module")
def apart(
    namespaces: dict[str, Namespace], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Prefill and decode on networks of their own; KV goes from worker to worker."""
    shape = Shape(
        decode=1,
        routers=1,
        handoff="direct",
        places={role: (each.name, each.address) for role, each in namespaces.items()},
    )
    made = Deployment(tmp_path_factory.mktemp("apart"), shape)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_workers_on_networks_of_their_own_hand_over(apart: Deployment) -> None:
    apart.wait_handing_over()


def test_a_token_bucket_between_prefill_and_decode_costs_time_only(
    apart: Deployment, namespaces: dict[str, Namespace]
) -> None:
    apart.wait_handing_over()
    prefill = namespaces["prefill"]
    try:
        prefill.limit("2mbit")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no rate may be set here: {said(error)}")
    try:
        for question in QUESTIONS:
            apart.check_right(question)
    finally:
        prefill.unlimit()
    apart.check_nothing_leaks()


@pytest.mark.parametrize("point", ["handoff.got_prefill_started", "handoff.got_commit"])
def test_a_partition_between_prefill_and_decode_changes_no_answer(
    apart: Deployment, namespaces: dict[str, Namespace], point: str
) -> None:
    apart.wait_handing_over()
    decode, prefill = namespaces["decode"], namespaces["prefill"]
    with apart.pausing("decode", point) as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(apart.ask, QUESTION))
        decode.drop(True, prefill.address)
        try:
            pause.release()
            answer = asked.result(240)
            assert answer.is_right(apart.expected[QUESTION]), answer
            # and while it lasts
            apart.check_right(QUESTIONS[1])
        finally:
            decode.drop(False, prefill.address)
    apart.restore()
    apart.check_nothing_leaks()
    apart.wait_handing_over()


def test_a_decode_worker_cut_off_from_its_router_is_replaced_or_missed_cleanly(
    apart: Deployment, namespaces: dict[str, Namespace]
) -> None:
    decode = namespaces["decode"]
    with apart.pausing("decode", "handoff.got_commit") as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(apart.ask, QUESTION))
        decode.drop(True, decode.ours)
        try:
            pause.release()
            answer = asked.result(240)
        finally:
            decode.drop(False, decode.ours)
    expected = apart.expected[QUESTION]
    assert answer.is_right(expected) or answer.is_clean_error(expected), answer
    apart.restore()
    apart.check_nothing_leaks()
