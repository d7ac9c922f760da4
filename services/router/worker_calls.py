"""What a worker answers to a unary call, and says of itself: looked at before it is used."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from diptych.errors import EngineError, UnavailableError
from diptych.proto import worker_pb2

_MAX_NAME = 256


async def finish(call: Any) -> Any:
    """The response of a unary call. grpc.aio loses a cancellation that comes with the response, and
    says of a channel that was closed meanwhile what would end the caller.

    Raises:
        UnavailableError: the channel was closed.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task else 0
    try:
        return await call
    except asyncio.CancelledError:
        if task and task.cancelling() > cancels:
            raise
        raise UnavailableError("the connection to the worker was closed") from None
    finally:
        if task and task.cancelling() > cancels:
            raise asyncio.CancelledError


def brief(error: BaseException) -> str:
    return error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)


def check_info(info: worker_pb2.WorkerInfo) -> None:
    """
    Raises:
        EngineError: a name is none: it would stand in logs, labels and messages to others.
    """
    for field in ("worker_id", "incarnation", "model", "kv_namespace"):
        name = getattr(info, field)
        if len(name) > _MAX_NAME or not name.isprintable():
            raise EngineError(f"its {field} is no name")
    if not info.incarnation:
        raise EngineError("it has no incarnation")
