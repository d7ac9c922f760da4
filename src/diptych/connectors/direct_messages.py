"""What the engines of a direct hand-off say to each other: one struct, msgpack."""

from __future__ import annotations

from typing import Annotated

import msgspec

from diptych.connectors.handoff import Event
from diptych.errors import TransferError

TO_DECODE = frozenset(
    {
        Event.PREFILL_STARTED,
        Event.CHUNK,
        Event.COMMIT,
        Event.STORED,
        Event.REVOKE,
        Event.VALID,
        Event.GONE,
    }
)
TO_PREFILL = frozenset({Event.ACK, Event.RENEW, Event.READ_DONE})


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class HandoffMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of one hand-off.

    Attributes:
        number: of an announcement, or the last one that an ACK confirms.
        start: with a COMMIT or STORED, the position in the output of decode's first token.
        num_tokens: tokens from position 0 on whose KV is announced; with a READ_DONE, of how many
            tokens it was read.
        block_ids: prefill's blocks of them, from position 0 on.
        token_id: with a COMMIT or STORED, what prefill sampled after the prompt.
        num_cached_tokens: with a COMMIT or STORED, prompt tokens that prefill found computed.
        checksums: with a COMMIT, one per block of prefill; empty where they are not verified.
        verifies: of decode's messages: whether it compares checksums of what it reads from this
            worker, so that prefill need take none for it.
        ended: with a GONE, whether the request itself ended at prefill, by what it sampled or
            because its router said so: nothing went wrong, and the router tells decode.
    """

    kind: Event
    request_id: str
    epoch: Count
    number: Count = 0
    start: Count = 0
    num_tokens: Count = 0
    block_ids: list[Count] = []
    token_id: TokenId = -1
    num_cached_tokens: Count = 0
    checksums: list[int] = []
    verifies: bool = True
    ended: bool = False

    def encode(self) -> bytes:
        """For `decode`, on the wire."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> HandoffMessage:
        """Parse what `encode` made.

        Raises:
            TransferError: it is no such message.
        """
        try:
            message = _decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise TransferError(f"a peer's hand-off message cannot be read: {error}") from error
        if message.kind not in TO_DECODE | TO_PREFILL:
            raise TransferError(f"a peer sent {message.kind}, which no engine is to send")
        return message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandoffMessage)
