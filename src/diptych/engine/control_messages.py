"""What passes between a service process and its engine beside the steps: hand-offs' control.

It has a socket of its own, so that it waits neither for a step nor for a step's outputs. Frames are
those of `core_messages`: length-prefixed msgpack. A peer is named by its incarnation.
"""

from __future__ import annotations

import msgspec

from diptych.engine.core_messages import pack_frame
from diptych.errors import EngineError


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A message of one engine to a peer's, either way; the service does not read it. It may be
    dropped: engines repeat."""

    peer: str
    body: bytes


class PeerUp(msgspec.Struct, frozen=True, tag="peer_up"):
    """To the engine: the stream to a peer is there, and these are its cards."""

    peer: str
    cards: bytes


class PeerDown(msgspec.Struct, frozen=True, tag="peer_down"):
    """To the engine: that incarnation is gone for good. A stream that broke, and may come again, is
    none of its business."""

    peer: str


class PeerLink(msgspec.Struct, frozen=True, tag="peer_link"):
    """From the engine: whether it can read the peer's memory, as it changes. `failure` says why
    not; a peer that is tested yet is not usable."""

    peer: str
    usable: bool
    transport: str = ""
    gb_per_s: float = 0.0
    failure: str = ""


class HandoffFigures(msgspec.Struct, frozen=True, tag="figures"):
    """From the engine, whenever it changes: what became of its direct hand-offs since the start.

    `num_given_to_store` and `num_taken_from_store` are those that prefill gave up holding, and that
    decode was told so of: the KV goes through the store after all. `failures` counts what was not
    received by why; KV that arrived corrupt is among it, and counted on its own too. `read_seconds`
    is the time that reads took, from their order on, and `late_seconds` by how much the thread that
    moves bytes ran later than it had asked for.
    """

    num_read: int = 0
    num_not_read: int = 0
    num_given_to_store: int = 0
    num_tokens_given: int = 0
    num_received: int = 0
    num_taken_from_store: int = 0
    num_tokens_received: int = 0
    num_corrupt: int = 0
    num_ignored_events: int = 0
    read_seconds: float = 0.0
    late_seconds: float = 0.0
    failures: dict[str, int] = {}


ToControl = Control | PeerUp | PeerDown
FromControl = Control | PeerLink | HandoffFigures

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToControl)
_from_engine = msgspec.msgpack.Decoder(FromControl)


def encode_control(message: ToControl | FromControl) -> bytes:
    """Length and body.

    Raises:
        EngineError: the message is too long.
    """
    return pack_frame(_encoder.encode(message))


def decode_to_control(body: bytes | bytearray) -> ToControl:
    """
    Raises:
        EngineError: it is no control frame.
    """
    try:
        return _to_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the service sent what is no control frame: {error}") from None


def decode_from_control(body: bytes | bytearray) -> FromControl:
    """
    Raises:
        EngineError: it is no control frame.
    """
    try:
        return _from_engine.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine sent what is no control frame: {error}") from None
