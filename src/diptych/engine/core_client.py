"""An engine in a process of its own, seen from the service process. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import diptych
from diptych import errors
from diptych.config import EngineConfig
from diptych.engine.control_client import ControlClient
from diptych.engine.control_messages import FromControl, ToControl
from diptych.engine.core import EngineInfo
from diptych.engine.core_messages import (
    PREFIX_BYTES,
    Abort,
    Failed,
    FromEngine,
    Ready,
    Start,
    Step,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from diptych.engine.limits import check_request
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from diptych.errors import CapacityError, DeadlineError, DiptychError, EngineDeadError, EngineError

logger = logging.getLogger(__name__)

DEFAULT_FACTORY = "diptych.engine.core:make_engine_core"
MAX_QUEUED_OUTPUTS = 1024
STATUS_TIMEOUT_S = 5.0


class EngineCoreClient:
    """Starts the engine process, submits to it and hands out its outputs. For one event loop."""

    def __init__(self, *, factory: str = DEFAULT_FACTORY) -> None:
        """`factory` is `module:function`, called with the config in the engine process."""
        self._factory = factory
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._death: EngineDeadError | None = None
        self._closing = False
        self._live: set[str] = set()
        self._queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue(MAX_QUEUED_OUTPUTS)
        self._control = ControlClient()
        self.stats = SchedulerStats()

    @property
    def info(self) -> EngineInfo:
        """What the engine is; known once `start` has returned."""
        if self._info is None:
            raise EngineDeadError("the engine has not been started")
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._info is not None and self._death is None and not self._closing

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, config: EngineConfig, *, startup_timeout_s: float = 600.0) -> None:
        """Start the process and wait until its model is loaded.

        Raises:
            DiptychError: by name, what kept the engine from being built (`ModelLoadError`, ...).
            EngineDeadError: the process ended without a word.
            DeadlineError: it was not ready in time.
        """
        try:
            async with asyncio.timeout(startup_timeout_s):
                await self._launch(config)
        except TimeoutError:
            await self.close(timeout_s=0.0)
            raise DeadlineError(
                f"the engine was not ready within {startup_timeout_s:g} s"
            ) from None
        except BaseException:
            await self.close(timeout_s=1.0)
            raise

    async def submit(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run here.
            CapacityError: too many requests are queued.
            EngineDeadError: the engine is gone.
        """
        check_request(request, self.info.max_model_len)
        if len(self._live) >= self.info.max_num_queued_reqs + self.info.max_num_seqs:
            raise CapacityError(f"the engine holds {len(self._live)} requests already")
        self._live.add(request.request_id)
        try:
            await self._send(Submit(request))
        except DiptychError:
            self._live.discard(request.request_id)
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each that is known gets a last entry. Unknown ids are ignored.

        Raises:
            EngineDeadError: the engine is gone.
        """
        await self._send(Abort(list(request_ids)))

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """Each step's results, in order, until the engine is closed. For one reader.

        Raises:
            EngineDeadError: the engine is gone; what it had sent comes first.
        """
        while (outputs := await self._queue.get()) is not None:
            yield outputs
        if self._death is not None:
            raise self._death

    def send_control(self, message: ToControl) -> None:
        """Pass a control message, or news of a peer, on to the engine: at once, beside the steps,
        without a promise. Engines repeat what gets lost."""
        self._control.send(message)

    def controls(self) -> AsyncIterator[FromControl]:
        """What the engine says to its peers and of them, until it is closed. For one reader."""
        return self._control.messages()

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the process, by force after `timeout_s`. Idempotent."""
        self._closing = True
        if self._process is not None:
            await self._stop(self._process, timeout_s)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        await self._control.close()
        self._end_outputs()

    # --- the process

    async def _launch(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        our_control, their_control = socket.socketpair()
        with theirs, their_control:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "diptych.engine.core_proc",
                    "--fd",
                    str(theirs.fileno()),
                    "--control-fd",
                    str(their_control.fileno()),
                    pass_fds=(theirs.fileno(), their_control.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=_environment(config),
                )
            except BaseException:
                ours.close()
                our_control.close()
                raise
        await self._control.open(our_control)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        await self._send_frame(Start(config, self._factory))
        self._info = await self._wait_until_ready(reader)
        self._reading = asyncio.create_task(self._read_outputs(reader))

    async def _wait_until_ready(self, reader: asyncio.StreamReader) -> EngineInfo:
        try:
            message = await _read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._process.wait() if self._process is not None else None
            raise EngineDeadError(f"the engine process ended with status {status}") from None
        if isinstance(message, Ready):
            return message.info
        raise _named_error(message)

    async def _stop(self, process: Process, timeout_s: float) -> None:
        if process.returncode is None:
            with contextlib.suppress(EngineDeadError, OSError):
                await self._send_frame(Stop())
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            logger.warning("the engine process did not stop within %g s: killed", timeout_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # --- frames

    async def _send(self, message: ToEngine) -> None:
        if self._death is not None:
            raise self._death
        if not self.is_alive:
            raise EngineDeadError("the engine is closed")
        await self._send_frame(message)

    async def _send_frame(self, message: ToEngine) -> None:
        if self._writer is None:
            raise EngineDeadError("the engine has not been started")
        self._writer.write(encode_frame(message))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise self._death or EngineDeadError(f"the engine is gone: {error}") from None

    async def _read_outputs(self, reader: asyncio.StreamReader) -> None:
        """Queue what the engine sends, until it is gone; a full queue makes the engine wait."""
        reason = ""
        try:
            while True:
                message = await _read_frame(reader)
                if isinstance(message, Step):
                    self._note(message.outputs)
                    await self._queue.put(message.outputs)
                elif isinstance(message, Failed):
                    reason = message.message
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except DiptychError as error:
            reason = error.message
        if not self._closing:
            self._death = EngineDeadError(f"the engine is gone: {reason or await self._status()}")
            logger.error("%s", self._death)
        await self._queue.put(None)

    async def _status(self) -> str:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await self._process.wait() if self._process is not None else None
        except TimeoutError:  # it closed its socket and lives: stuck in a driver, say
            return "its process hangs"
        return f"its process ended with status {status}"

    def _note(self, outputs: EngineCoreOutputs) -> None:
        self.stats = outputs.stats
        for entry, request_id in enumerate(outputs.request_ids):
            if outputs.finish_reasons[entry] or entry in outputs.commits:
                self._live.discard(request_id)

    def _end_outputs(self) -> None:
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except asyncio.QueueFull:
                self._queue.get_nowait()


async def _read_frame(reader: asyncio.StreamReader) -> FromEngine:
    prefix = await reader.readexactly(PREFIX_BYTES)
    return decode_from_engine(await reader.readexactly(frame_length(prefix)))


def _named_error(message: FromEngine) -> DiptychError:
    """The error that kept the engine from being built."""
    if not isinstance(message, Failed):
        return EngineError("the engine's first frame says neither ready nor failed")
    kind = getattr(errors, message.error, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, DiptychError)):
        kind = EngineError
    return kind(message.message)


def _environment(config: EngineConfig) -> dict[str, str]:
    """The child's environment: it finds this package, and never the folders of its directory."""
    package_root = str(Path(diptych.__file__).parents[1])
    paths = [package_root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    changes = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
        "PYTHONSAFEPATH": "1",
    }
    if config.num_threads is not None:
        changes["OMP_NUM_THREADS"] = str(config.num_threads)
    return {**os.environ, **changes}
