"""One streamed request against an OpenAI endpoint, timed by the client's clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from diptych.bench.serve_events import DONE, Failure, ServerSentEvents, parse_event
from diptych.errors import DiptychError


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are `time.perf_counter`'s.

    `piece_s` has the arrival of each event with new tokens, `piece_tokens` how many it brought.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    piece_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output_len(self) -> int:
        """Tokens: what the server says it made, else what was seen."""
        return self.completion_tokens or sum(self.piece_tokens)

    def token_s(self, number: int) -> float | None:
        """When token `number`, from 1 on, was here."""
        seen = 0
        for at, tokens in zip(self.piece_s, self.piece_tokens, strict=True):
            seen += tokens
            if seen >= number:
                return at
        return None


class StreamClient:
    """Sends bodies that ask for a stream. Nothing of an answer is kept but times and its tokens."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self._session = session
        self._url = url
        self._headers = {"Content-Type": "application/json", **headers}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def send(self, body: bytes) -> Answer:
        """The answer, however it ends: a failure is named in it."""
        answer = Answer(start_s=time.perf_counter())
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, timeout=self._timeout
            ) as response:
                if response.status == 200:
                    await _read(response.content, answer)
                else:
                    answer.error = f"{response.status} {_failure(await response.read())}"
        except TimeoutError:
            answer.error = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            answer.error = type(error).__name__
        except DiptychError as error:
            answer.error = f"stream {type(error).__name__}"
        answer.end_s = time.perf_counter()
        return answer


async def _read(content: aiohttp.StreamReader, answer: Answer) -> None:
    events = ServerSentEvents()
    done = False
    async for data in content.iter_any():
        now = time.perf_counter()
        for event in events.feed(data):
            done = done or event == DONE
            if not done:
                _take(answer, event, now)
    if answer.error is None and not done:
        answer.error = "stream ended early"
    elif answer.error is None and not answer.piece_s:
        answer.error = "no tokens"


def _take(answer: Answer, data: bytes, now: float) -> None:
    event = parse_event(data)
    if event.error is not None:
        answer.error = answer.error or f"stream {event.error.name}"
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.completion_tokens = event.usage.completion_tokens
    if tokens := event.num_tokens:
        answer.piece_s.append(now)
        answer.piece_tokens.append(tokens)
    for choice in event.choices:
        answer.token_ids += choice.token_ids or ()
        if choice.new_text:
            answer.text.append(choice.new_text)
        answer.finish_reason = choice.finish_reason or answer.finish_reason


def _failure(body: bytes) -> str:
    """The name of an error response."""
    try:
        return msgspec.json.decode(body, type=dict[str, Failure])["error"].name
    except (msgspec.MsgspecError, KeyError):
        return "error"
