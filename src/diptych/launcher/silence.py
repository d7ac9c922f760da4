"""When a person should hear that a process waits in vain for another service."""

from __future__ import annotations

from collections.abc import Callable

# the words of `/readyz` for that; all else that it names ends by itself, as the load of a model
_WORDS = "does not answer"
_PATIENCE_S = 3.0


class Silence:
    """Tells the first reason that lasts, once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._since: float | None = None
        self._told = False

    def heard(self, reason: str, now_s: float) -> None:
        """Why a process is not ready now."""
        if _WORDS not in reason:
            self._since = None
            return
        if self._since is None:
            self._since = now_s
        if not self._told and now_s - self._since >= _PATIENCE_S:
            self._told = True
            self._tell(reason.splitlines()[0])


def silent_service(reason: str) -> str:
    """Who does not answer: the same whatever waits for it, and however the network says no."""
    return reason.partition(_WORDS)[0].rpartition(": ")[2].strip()
