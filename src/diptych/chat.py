"""`diptych chat`: a conversation in a terminal, with any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from diptych.errors import DiptychError, UnavailableError

_TIMEOUT_S = 600.0


def run(
    url: str,
    *,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    api_key: str | None = None,
) -> int:
    """Read lines from standard input, write answers to standard output, until the end of input.

    Returns 1 where a line got an error for an answer, else 0.

    Raises:
        UnavailableError: the server cannot be reached.
    """
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = 0
    server = _Server(url, api_key)
    model = model or server.first_model()
    messages = [{"role": "system", "content": system}] if system else []
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        body = {"model": model, "messages": messages, "temperature": temperature, "stream": True}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            answer = _show(server.stream(body))
        except DiptychError as error:
            print(f"error: {error.message}", file=sys.stderr)
            messages.pop()
            code = 1
            continue
        messages.append({"role": "assistant", "content": answer})
    return code


class _Server:
    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = server_root(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        with self._open("/v1/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UnavailableError(f"{self._url} is no OpenAI-compatible server") from None

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        with self._open("/v1/chat/completions", body) as response:
            try:
                for raw in response:
                    line = raw.decode(errors="replace").strip()
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield from _pieces(json.loads(line[6:]))
            except (HTTPException, OSError, ValueError, LookupError, TypeError) as error:
                raise UnavailableError(f"the answer broke off: {error}") from None
        raise UnavailableError("the answer broke off")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise UnavailableError(f"HTTP {error.code}: {text}") from None
        except (HTTPException, OSError, ValueError) as error:
            raise UnavailableError(f"{self._url} cannot be reached: {error}") from None


def server_root(url: str) -> str:
    """The server's address, from it, from `HOST:PORT` or from a base URL that ends in /v1."""
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise UnavailableError(event["error"]["message"])
    for choice in event["choices"]:
        yield choice["delta"].get("content") or ""


def _read_line() -> str | None:
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _show(pieces: Iterator[str]) -> str:
    answer = ""
    for piece in pieces:
        answer += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer
