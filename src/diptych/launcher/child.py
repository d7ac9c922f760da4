"""One child process of the launcher: started, watched until ready, stopped, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from diptych.errors import DeadlineError, UnavailableError
from diptych.launcher.plan import ProcessSpec
from diptych.launcher.silence import Silence

_POLL_S = 0.1
_LEAST_PORT = 12_000
_DEALT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Loopback never goes through a proxy that the environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> list[int]:
    """Loopback ports that were free a moment ago, all different, and outside the range from which
    the kernel deals ports to whoever connects: nobody takes them by chance before the child does.

    Raises:
        UnavailableError: there are not so many.
    """
    first_dealt = int(_DEALT_PORTS.read_text().split()[0])
    candidates = list(range(_LEAST_PORT, max(first_dealt, _LEAST_PORT + 10_000)))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    raise UnavailableError(f"no {count} free ports on 127.0.0.1")


class Child:
    """A `diptych` process with its configuration and log in `directory`."""

    def __init__(self, spec: ProcessSpec, directory: Path) -> None:
        self.spec = spec
        self._config = directory / f"{spec.name}.yaml"
        self.log = directory / f"{spec.name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Spawn it in a session of its own: a terminal's Ctrl-C reaches the launcher only."""
        self._config.touch(mode=0o600)
        self._config.write_text(yaml.safe_dump(self.spec.sections, sort_keys=False))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")
        }
        for name in ("DIPTYCH_CACHE", "DIPTYCH_LOG_LEVEL"):
            if name in os.environ:
                environment[name] = os.environ[name]
        environment.update(self.spec.environment, DIPTYCH_DIE_WITH_PARENT="1", PYTHONSAFEPATH="1")
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "diptych.cli",
                self.spec.command,
                "--config",
                str(self._config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def wait_ready(self, timeout_s: float, tell: Callable[[str], None]) -> None:
        """Return once `/readyz` says so; `tell` hears early why not, where it waits for a service
        that does not answer.

        Raises:
            UnavailableError: it ended first; the message holds the end of its log.
            DeadlineError: it did not become ready in time; the message says why not.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        reason, silence = "no answer", Silence(tell)
        while loop.time() < deadline:
            if self.returncode is not None:
                raise UnavailableError(
                    f"{self.spec.name} ended with code {self.returncode}:\n{self.log_tail()}"
                )
            ready, reason = await asyncio.to_thread(self._ask_ready)
            if ready:
                return
            silence.heard(reason, loop.time())
            await asyncio.sleep(_POLL_S)
        raise DeadlineError(
            f"{self.spec.name} is not ready after {timeout_s:.0f} s: {reason}\n{self.log_tail()}"
        )

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then, after `timeout_s`, SIGKILL to its whole session. Idempotent."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                # not wait_for: before Python 3.12 it can swallow a cancellation
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        self.kill()  # whatever it left in its session goes too
        await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to its whole session. Its engine, in another one, ends with it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 15) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace").splitlines()
            return "\n".join(f"  {line}" for line in text[-lines:])
        return ""

    def _ask_ready(self) -> tuple[bool, str]:
        url = f"http://{self.spec.host}:{self.spec.admin_port}/readyz"
        try:
            with _DIRECT.open(url, timeout=2.0) as response:
                return response.status == 200, "ready"
        except urllib.error.HTTPError as error:
            with error:
                return False, error.read(500).decode(errors="replace").strip()
        except OSError as error:
            return False, str(error)
