"""What passes between a service process and its engine process: length-prefixed msgpack frames."""

from __future__ import annotations

import struct

import msgspec

from diptych.config import EngineConfig
from diptych.engine.core import EngineInfo
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest
from diptych.errors import EngineError

MAX_FRAME_BYTES = 256 << 20
_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First frame to the engine: what to build. `factory` is `module:function` of the config."""

    config: EngineConfig
    factory: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Queue a request."""

    request: EngineCoreRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests; unknown ids are ignored."""

    request_ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First frame from the engine, if it could be built."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Last frame from an engine that could not be built or cannot go on, by the error's name."""

    error: str
    message: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One step's results."""

    outputs: EngineCoreOutputs


ToEngine = Start | Submit | Abort | Stop
FromEngine = Ready | Failed | Step

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Length and body.

    Raises:
        EngineError: the message is too long.
    """
    return pack_frame(_encoder.encode(message))


def pack_frame(body: bytes) -> bytes:
    """Length and body.

    Raises:
        EngineError: it is too long.
    """
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _PREFIX.pack(len(body)) + body


def frame_length(prefix: bytes | bytearray) -> int:
    """Length of the body that follows.

    Raises:
        EngineError: it is over the limit; the stream is not what it should be.
    """
    (length,) = _PREFIX.unpack_from(prefix)
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


def take_frames(buffer: bytearray) -> list[bytearray]:
    """The bodies that have come whole, taken off the buffer.

    Raises:
        EngineError: a length is over the limit.
    """
    bodies: list[bytearray] = []
    start = 0
    while len(buffer) - start >= PREFIX_BYTES:
        body = start + PREFIX_BYTES
        end = body + frame_length(buffer[start:body])
        if len(buffer) < end:
            break
        bodies.append(buffer[body:end])
        start = end
    del buffer[:start]
    return bodies


def decode_to_engine(body: bytes | bytearray | memoryview) -> ToEngine:
    return _to_engine.decode(body)


def decode_from_engine(body: bytes | bytearray | memoryview) -> FromEngine:
    """A frame of the engine.

    Raises:
        EngineError: it is none.
    """
    try:
        return _from_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine sent what is no frame: {error}") from None
