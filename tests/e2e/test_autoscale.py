"""`diptych up --autoscale`: load starts workers, idleness drains them, and no answer is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from diptych.launcher.child import free_ports
from tests.e2e.cluster import Api, ServiceProcess, until
from tests.e2e.launched import descendants, process_of, running
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Prompts that keep a prefill worker busy for some time, all different, so that none is cached.
PROMPTS = [[(7 * j * j + j * i + i) % 200 + 3 for j in range(700)] for i in range(8)]


class Load:
    """Clients that ask one thing after the other, and what they got."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stop = threading.Event()
        self.answers: list[tuple[int, str]] = []

    def ask(self, number: int) -> str:
        fields = {"max_tokens": 100, "seed": number, "temperature": 0.8, "ignore_eos": True}
        salt = f"{number}-{time.monotonic_ns()}"
        answer = self._api.complete(PROMPTS[number], cache_salt=salt, **fields)
        return str(answer["choices"][0]["text"])

    def _client(self, number: int) -> None:
        while not self._stop.is_set():
            self.answers.append((number, self.ask(number)))

    @contextmanager
    def of(self, num_clients: int) -> Iterator[None]:
        """This many clients while the block runs; what goes wrong for one of them is raised."""
        self._stop.clear()
        with ThreadPoolExecutor(num_clients) as pool:
            clients = [pool.submit(self._client, number) for number in range(num_clients)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()


def test_pools_grow_under_load_and_shrink_when_idle_without_cutting_an_answer(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model")
    admin_port = free_ports(1)[0]
    argv = f"up --model {model} --served-model-name tiny --num-kv-blocks 256 --max-num-seqs 1"
    scaling = "--autoscale --max-prefill 2 --max-decode 2 --interval-s 0.5 --cooldown-s 2"
    thresholds = f"--queue-high 1 --admin-port {admin_port}"
    with running(tmp_path, *argv.split(), *scaling.split(), *thresholds.split()) as server:
        router = ServiceProcess("router", {}, tmp_path, admin_port)
        load = Load(Api(int(server.url.rsplit(":", 1)[1])))
        expected = [load.ask(number) for number in range(len(PROMPTS))]

        def ready(role: str) -> float:
            return router.metric("diptych:workers_ready", role=role)

        assert (ready("prefill"), ready("decode")) == (1, 1)
        with load.of(8):
            until(lambda: ready("decode") == 2, "a second decode worker")
            until(lambda: ready("prefill") == 2, "a second prefill worker")
        grown = len(load.answers)

        # a client goes on meanwhile: its worker may be the one that goes, but its answers stay
        with load.of(1):
            until(lambda: ready("decode") == 1, "one decode worker is drained")
            until(lambda: ready("prefill") == 1, "one prefill worker is drained")
            until(lambda: not process_of(server.process.pid, "prefill-1.yaml"), "it has ended")
            until(lambda: not process_of(server.process.pid, "decode-1.yaml"), "it has ended")

        assert len(load.answers) > grown > 8
        assert all(text == expected[number] for number, text in load.answers)
        assert "ended with code" not in server.log.read_text(), "none of them crashed"
        assert len(descendants(server.process.pid)) >= 7
