"""Clients of the HTTP API that say what became of their request, whatever it was."""

from __future__ import annotations

import http.client
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CLIENT_TIMEOUT_S = 180.0
_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known from an unfaulted run."""

    prompt: tuple[int, ...]
    max_tokens: int = 24
    seed: int | None = None
    salt: str = ""  # of the caches; drawn for each asking if empty

    def body(self) -> dict[str, Any]:
        """As JSON; with a salt of its own nothing of it is cached anywhere."""
        sampling = {"temperature": 0} if self.seed is None else {"seed": self.seed, "top_p": 0.9}
        return {
            "model": "tiny",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": self.salt or f"{os.getpid()}-{next(_salts)}",
            **sampling,
        }


def tokens(salt: int, count: int) -> tuple[int, ...]:
    """Prompts that differ from their first token on."""
    return tuple((7 * i * i + i + 31 * salt) % 200 + 3 for i in range(count))


# a tail only; a page and a tail; three pages and a tail
QUESTIONS = (
    Question(tokens(1, 40)),
    Question(tokens(2, 100), seed=11),
    Question(tokens(3, 200), seed=5),
)


@dataclass(slots=True)
class Answer:
    """What a client got: text so far, whether it was told the end, or why there is none."""

    text: str = ""
    ended: bool = False
    status: int = 0
    error: str = ""  # what the API says
    broken: str = ""  # the connection ended without a word

    def is_right(self, expected: str) -> bool:
        """The whole answer, no token lost, repeated or altered."""
        return self.ended and not self.error and self.text == expected

    def is_clean_error(self, expected: str) -> bool:
        """The API said that it failed, and whatever came before that was right."""
        return bool(self.error) and not self.broken and expected.startswith(self.text)


@contextmanager
def asking(port: int, question: Question) -> Iterator[http.client.HTTPResponse]:
    """The response of a streamed completion; leaving the block closes the connection.

    Raises:
        OSError, http.client.HTTPException: there is none.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_TIMEOUT_S)
    try:
        body = json.dumps(question.body())
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def ask(port: int, question: Question, on_text: Callable[[str], None] | None = None) -> Answer:
    """Ask and wait for the end, whatever it is; `on_text` sees the text as it grows."""
    answer = Answer()
    try:
        with asking(port, question) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = str(json.load(response)["error"]["message"])
                return answer
            for event in _events(response):
                _take(answer, event)
                if on_text is not None:
                    on_text(answer.text)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    if not (answer.ended or answer.error or answer.broken):
        answer.broken = "the stream ended early"
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"]["message"])
    for choice in event.get("choices", ()):
        answer.text += choice["text"]
        answer.ended = answer.ended or choice["finish_reason"] is not None
