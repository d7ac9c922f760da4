"""`diptych up` and `diptych serve`: everything on one machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diptych.config import RedisConfig
from diptych.config_sources import Settings
from diptych.errors import ConfigError, DiptychError, UnavailableError
from diptych.launcher.checks import check_together
from diptych.launcher.plan import ProcessSpec, url_host
from diptych.launcher.supervisor import Supervisor
from diptych.models.fetch import resolve_model
from diptych.private_folder import make_private_folder
from diptych.redis_url import without_password

_LONGEST_DIRECTORY = 80


def run(settings: Settings, *, aggregated: bool = False) -> int:
    """Run until SIGINT or SIGTERM; returns 0 after a clean stop.

    Raises:
        DiptychError: something did not start; nothing is left running.
    """
    # Handlers of our own until the loop has its: in the background a shell ignores SIGINT, and
    # SIGTERM would leave a download behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check_together(settings, aggregated=aggregated)
    router = settings["router"]
    for name in ("port", "grpc_port", "admin_port"):
        _check_port(router.host, getattr(router, name), "--" + name.replace("_", "-"))
    say(f"model {settings['engine'].model}")
    resolve_model(settings["engine"].model, settings["engine"].revision)
    directory = make_private_folder("diptych-up-", _LONGEST_DIRECTORY)
    try:
        return asyncio.run(_run(settings, directory, aggregated))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _run(settings: Settings, directory: Path, aggregated: bool) -> int:
    logs = Path(settings["up"].log_dir or directory / "logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"logs cannot be kept in {logs}: {error.strerror}") from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(settings, directory, logs, say, aggregated=aggregated)

    def on_signal() -> None:
        if stop.is_set():
            say("stopping at once")
            supervisor.kill()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    started = time.monotonic()
    try:
        if await _start_unless_stopped(supervisor, stop):
            say(f"all ready after {time.monotonic() - started:.1f} s")
            specs = [child.spec for child in supervisor.children.values()]
            for line in places(specs, supervisor.redis_url, settings["redis"].registry_prefix):
                say(line)
            _print_invitation(settings, logs)
            await stop.wait()
        say("stopping; once more to stop at once")
    finally:
        await supervisor.stop()
    say("stopped")
    return 0


async def _start_unless_stopped(supervisor: Supervisor, stop: asyncio.Event) -> bool:
    """True once all is ready, False if a signal came first."""
    starting = asyncio.create_task(supervisor.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
            await starting
        return False
    try:
        starting.result()
    except ExceptionGroup as group:
        named = [e for e in group.exceptions if isinstance(e, DiptychError)]
        raise UnavailableError("\n".join(e.message for e in named) or str(group)) from None
    return True


def say(text: str) -> None:
    """A line for the person who waits."""
    print(f"diptych: {text}", file=sys.stderr, flush=True)


def places(specs: Sequence[ProcessSpec], redis_url: str | None, prefix: str) -> list[str]:
    """Where each process is reached, the directory, and how to look into the store.

    Args:
        specs: of the processes that run.
        redis_url: of the directory; None where there is none.
        prefix: of the registry's keys.
    """
    rows = [(s.name, s.address, f"http://{s.host}:{s.admin_port}/metrics") for s in specs]
    named = max(len(name) for name in [*(row[0] for row in rows), "directory"])
    reached = max(len(row[1]) for row in rows)
    lines = [f"{name:{named}}  gRPC {at:{reached}}  {url}" for name, at, url in rows]
    if redis_url is not None:
        url = without_password(redis_url)
        lines.append(f"{'directory':{named}}  {url}")
        if any(spec.command == "kvstore" for spec in specs):
            command = ["diptych", "store", "stats", "--redis", url]
            if prefix != RedisConfig().registry_prefix:
                command += ["--registry-prefix", prefix]
            lines.append(shlex.join(command))
    return lines


def _print_invitation(settings: Settings, logs: Path) -> None:
    router = settings["router"]
    host = url_host(router.host)
    url = f"http://{host}:{router.port}"
    say(
        f"logs in {logs}{'' if settings['up'].log_dir else ' while it runs (--log-dir keeps them)'}"
    )
    question = {"role": "user", "content": "What is the capital of France?"}
    model = settings["engine"].served_model_name or settings["engine"].model
    body = json.dumps({"model": model, "temperature": 0, "messages": [question]})
    print(
        f"\n{url}\n\ncurl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}\n",
        flush=True,
    )


def _check_port(host: str, port: int, flag: str) -> None:
    """Say at once that the port is taken, rather than after the model has loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        advice = ""
        if error.errno == errno.EADDRINUSE:
            advice = f"; another server may be running, or choose {flag}"
        raise ConfigError(f"cannot listen on {host}:{port}: {_reason(error)}{advice}") from None


def _reason(error: OSError) -> str:
    """Without the address, which `create_server` adds."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)
