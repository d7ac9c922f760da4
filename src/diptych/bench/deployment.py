"""A whole system of its own for a benchmark: `diptych up` or `diptych serve` as a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence

from diptych.errors import UnavailableError
from diptych.launcher.child import free_ports

_POLL_S = 0.1
_STOP_S = 60.0
# loopback never goes through a proxy that the environment may name
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Deployment:
    """`with Deployment("up", flags) as deployment:` on free ports; gone at the end of the block.

    `ready_s`: seconds until it answered.
    """

    def __init__(self, command: str, flags: Sequence[str]) -> None:
        port, admin_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{admin_port}/metrics"
        self.ready_s = 0.0
        self.exit_code: int | None = None
        ports = ["--port", str(port), "--admin-port", str(admin_port)]
        self._argv = [sys.executable, "-P", "-m", "diptych.cli", command, *flags, *ports]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Deployment:
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            self._argv,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "DIPTYCH_DIE_WITH_PARENT": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End it as Ctrl-C would, and at last by force; `exit_code` is known then."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what it started ends with it
            self.exit_code = self._process.wait()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the router is ready.

        Raises:
            UnavailableError: it ended, or is not ready in time.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UnavailableError(f"the deployment ended with code {self._process.returncode}")
            with contextlib.suppress(OSError), _DIRECT.open(self.url + "/readyz", timeout=2):
                self.ready_s = time.monotonic() - self._started_s
                return
            time.sleep(_POLL_S)
        raise UnavailableError(f"not ready after {timeout_s:.0f} s")
