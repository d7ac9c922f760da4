"""What a streamed answer is made of: server-sent events, and what each says of tokens. Pure."""

from __future__ import annotations

import msgspec

from diptych.errors import InvalidRequestError

DONE = b"[DONE]"
_MOST_BYTES = 4 << 20


class ServerSentEvents:
    """Cuts a stream of bytes, however it was split, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that are whole now; comments and other fields are left out.

        Raises:
            InvalidRequestError: an event has no end.
        """
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise InvalidRequestError("an event of the stream has no end")
        return [found for block in whole if (found := _data(block)) is not None]


def _data(block: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


class Delta(msgspec.Struct):
    """The news of a chat's choice."""

    content: str | None = None


class Choice(msgspec.Struct):
    """The news of a choice, of a completion or a chat."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        return self.text or (self.delta.content if self.delta else None) or ""


class Usage(msgspec.Struct):
    """Token counts of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Failure(msgspec.Struct):
    """An error, in OpenAI form."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None

    @property
    def name(self) -> str:
        return str(self.code or self.type or "error")


class Event(msgspec.Struct):
    """One event of a streamed answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens: as many as there are ids, else one where there is text."""
        return sum(
            len(choice.token_ids) if choice.token_ids is not None else bool(choice.new_text)
            for choice in self.choices
        )


_event = msgspec.json.Decoder(Event)


def parse_event(data: bytes) -> Event:
    """What an event says.

    Raises:
        InvalidRequestError: it is not of OpenAI's form.
    """
    try:
        return _event.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"an event of the stream is not understood: {error}") from None
