"""`diptych up` with its processes killed, or stopped at a bad moment: nothing is lost or left."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import until
from tests.e2e.launched import Running, alive, descendants, launched, process_of, running
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHILDREN = {
    "directory": "redis.sock",
    "store": "diptych.cli kvstore",
    "prefill": "diptych.cli prefill",
    "decode": "diptych.cli decode",
    "router": "diptych.cli router",
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a small system."""
    model = make_tiny_model(tmp_path_factory.mktemp("hurt") / "model")
    return ["up", "--model", str(model), "--served-model-name", "tiny", "--num-kv-blocks", "256"]


def answer(server: Running) -> Any:
    body = {"model": "tiny", "prompt": [5, 6, 7] * 40, "max_tokens": 50, "ignore_eos": True}
    with server.post("/v1/completions", {**body, "temperature": 0}) as response:
        return json.load(response)["choices"][0]["text"]


def answers_as(server: Running, expected: str) -> bool:
    try:
        return bool(answer(server) == expected)
    except OSError:
        return False


def nothing_is_left(directory: Path, below: list[int]) -> None:
    until(lambda: not [pid for pid in below if alive(pid)], "all processes have ended")
    assert not [path.name for path in directory.iterdir() if path.name.startswith("diptych")]


def test_each_process_that_is_killed_is_started_again(tmp_path: Path, up: list[str]) -> None:
    with running(tmp_path, *up) as server:
        expected = answer(server)
        for name, words in CHILDREN.items():
            killed = process_of(server.process.pid, words)
            assert killed, name
            os.kill(killed, signal.SIGKILL)

            until(lambda w=words: bool(process_of(server.process.pid, w)), f"{name} runs again")
            until(lambda: answers_as(server, expected), f"an answer after {name} was killed")
        again = ["kvstore: ready", "prefill-0: ready", "decode-0: ready", "router: ready"]
        for line in ["directory: ready", *again]:
            until(lambda t=line: server.log.read_text().count(t) >= 2, f"{line}, once more")
        # those that were started again found one another: the split is whole
        server.wait_ready()
        assert answers_as(server, expected)
        below = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(150) == 0, server.log.read_text()
    nothing_is_left(tmp_path, below)


def test_a_second_ctrl_c_ends_what_hangs(tmp_path: Path, up: list[str]) -> None:
    with running(tmp_path, *up, "--stop-timeout-s", "1000") as server:
        below = descendants(server.process.pid)
        os.kill(process_of(server.process.pid, CHILDREN["decode"]), signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in server.log.read_text(), "the first Ctrl-C is heard")

        server.process.send_signal(signal.SIGINT)

        assert server.process.wait(150) == 0
        assert "stopping at once" in server.log.read_text()
    nothing_is_left(tmp_path, below)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path, up: list[str]) -> None:
    with running(tmp_path, *up) as server:
        below = descendants(server.process.pid)
        assert len(below) >= 7
        server.process.kill()
    until(lambda: not [pid for pid in below if alive(pid)], "all processes have ended")


@pytest.mark.parametrize("moment", ["directory: ready", "diptych.cli decode", "core_proc"])
def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path, up: list[str], moment: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    with launched(tmp_path, *up) as server:
        pid = server.process.pid

        def is_now() -> bool:
            return moment in server.log.read_text() or bool(process_of(pid, moment))

        until(is_now, moment, 60)
        below = descendants(pid)
        server.process.send_signal(signal.SIGTERM)

        assert server.process.wait(150) == 0, server.log.read_text()
        assert "Traceback" not in server.log.read_text()
    nothing_is_left(tmp_path, below)
    assert set(os.listdir("/dev/shm")) <= shared


def test_what_the_router_says_of_a_missing_pool_is_clear(tmp_path: Path, up: list[str]) -> None:
    """While a killed worker is away, `/readyz` says which; requests are answered all the same."""
    with running(tmp_path, *up) as server:
        expected = answer(server)
        os.kill(process_of(server.process.pid, CHILDREN["prefill"]), signal.SIGSTOP)

        def reason() -> str:
            try:
                with urllib.request.urlopen(server.url + "/readyz", timeout=60) as response:
                    return str(response.read().decode())
            except urllib.error.HTTPError as error:
                with error:
                    return error.read().decode()

        until(lambda: "no prefill worker is ready" in reason(), "the router names the pool")
        assert answer(server) == expected


def test_a_directory_that_does_not_answer_is_told_once(tmp_path: Path, up: list[str]) -> None:
    with launched(tmp_path, *up, "--redis", "redis://127.0.0.1:1") as server:
        line = "waiting: Redis at redis://127.0.0.1:1 does not answer"
        until(lambda: line in server.log.read_text(), "the reason is told")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(150) == 0, server.log.read_text()
        assert server.log.read_text().count("does not answer") == 1
