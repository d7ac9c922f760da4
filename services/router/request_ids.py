"""The ids of one call: what the client sees and what the workers see."""

from __future__ import annotations

import re

from diptych.errors import InvalidRequestError

HEADER = "X-Request-Id"
_ALLOWED = re.compile(r"[\x21-\x7e]{1,256}")


def client_request_id(given: str | None, fresh: str) -> str:
    """The client's own id where it gave one, else `fresh`.

    Raises:
        InvalidRequestError: longer than 256 characters or not printable ASCII.
    """
    if not given:
        return fresh
    if _ALLOWED.fullmatch(given) is None:
        raise InvalidRequestError(
            f"{HEADER} must be 1 to 256 printable ASCII characters without spaces", param=HEADER
        )
    return given


class InternalIds:
    """Ids for workers. They hold the router's incarnation and never what a client sent."""

    def __init__(self, router_incarnation: str) -> None:
        self._prefix = router_incarnation[:12]
        self._next = 0

    def new(self) -> str:
        self._next += 1
        return f"{self._prefix}-{self._next}"
