"""The engine process: `python -m diptych.engine.core_proc --fd N`, N a connected unix socket.

One loop on one thread: take what has arrived, run a step, send what it gave. It waits on the socket
only when there is nothing to compute, and ends when the socket does.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from typing import cast

from diptych.engine.control_port import ControlPort
from diptych.engine.core import EngineCore, EngineState
from diptych.engine.core_channel import CoreChannel
from diptych.engine.core_messages import Abort, Failed, Ready, Start, Step, Stop, Submit, ToEngine
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, FinishReason
from diptych.errors import DiptychError, EngineError
from diptych.fault_points import reach

logger = logging.getLogger(__name__)

TRANSFER_POLL_S = 0.001
# the threads of a hand-off must not wait 5 ms for the interpreter whenever the model thread is in
# Python, and they take it several times between two tokens
SWITCH_INTERVAL_S = 0.0001
_PR_SET_PDEATHSIG = 1


class EngineProcess:
    """Serves one engine core over one channel."""

    def __init__(self, core: EngineCore, channel: CoreChannel) -> None:
        self._core = core
        self._channel = channel

    def run(self) -> None:
        """Serve until the peer stops the engine or is gone, or the engine has failed."""
        while self._core.state is EngineState.READY:
            for message in self._channel.receive(self._patience_s()):
                if isinstance(message, Stop):
                    return
                self._handle(message)
            if self._core.has_work:
                reach("engine.step")
                outputs = self._core.step()
                if outputs is not None:
                    reach("engine.outputs")
                    self._channel.send(Step(outputs))
                    self._core.note_sent()
        self._channel.send(Failed(EngineError.__name__, self._core.failure))

    def _patience_s(self) -> float | None:
        if not self._core.has_work:
            return None
        return TRANSFER_POLL_S if self._core.is_waiting_for_transfers else 0.0

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message.request)
        elif isinstance(message, Abort):
            self._core.abort(message.request_ids)

    def _submit(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add_request(request)
        except DiptychError as error:
            self._channel.send(Step(self._refusal(request.request_id, error)))

    def _refusal(self, request_id: str, error: DiptychError) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            request_ids=[request_id],
            first_positions=[0],
            token_counts=[0],
            finish_reasons=[int(FinishReason.ERROR)],
            stop_token_ids=[-1],
            num_cached_tokens=[0],
            errors={0: error.message},
            stats=self._core.stats,
        )


def main() -> int:
    """Exit status 0 after a stop or the end of the peer, 1 after a failure."""
    parser = argparse.ArgumentParser(description="The engine process of a worker.")
    parser.add_argument("--fd", type=int, required=True, help="connected unix socket")
    parser.add_argument("--control-fd", type=int, help="another one, for control messages")
    args = parser.parse_args()
    _follow_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _configure_logging()
    channel = CoreChannel(socket.socket(fileno=args.fd))
    control = None
    if args.control_fd is not None:
        control = ControlPort(socket.socket(fileno=args.control_fd))
    try:
        return _serve(channel, control)
    except EOFError:
        return 0
    finally:
        channel.close()


def _serve(channel: CoreChannel, control: ControlPort | None) -> int:
    core = _build(channel)
    if core is None:
        return 1
    if control is not None:
        core.attach_control(control)
    # what is loaded stays: collections during steps need not walk through it
    gc.collect()
    gc.freeze()
    try:
        channel.send(Ready(core.info))
        EngineProcess(core, channel).run()
        return 1 if core.state is EngineState.FAILED else 0
    finally:
        core.close()


def _build(channel: CoreChannel) -> EngineCore | None:
    """The engine that the first frame asks for; if it cannot be built, the peer learns why."""
    messages: list[ToEngine] = []
    while not messages:
        messages = channel.receive(None)
    start = messages[0]
    if not isinstance(start, Start):
        raise EngineError("the first frame is not a start")
    try:
        module, function = start.factory.split(":")
        return cast(EngineCore, getattr(importlib.import_module(module), function)(start.config))
    except DiptychError as error:
        channel.send(Failed(type(error).__name__, error.message))
    except Exception as error:
        logger.exception("the engine could not be built")
        channel.send(Failed(EngineError.__name__, f"{type(error).__name__}: {error}"))
    return None


def _configure_logging() -> None:
    """As the services do (`observe.configure_logging`), without their imports."""
    level = os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        format="%(asctime)s %(levelname)s engine[%(process)d] %(name)s: %(message)s",
    )


def _follow_parent() -> None:
    """End with the parent even in the middle of a step; Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
