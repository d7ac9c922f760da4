"""Batches of one call, each asked for while the one before it is moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from diptych.connectors.store_session import Ahead, OutOfTimeError, StoreSession

B = TypeVar("B")


class Pipeline(Generic[B]):
    """What has been asked ahead counts only on the session that asked; a lost one's answers lapse
    by themselves."""

    def __init__(self, batches: Sequence[B], ask: Callable[[StoreSession, B], Ahead]) -> None:
        self.batches = batches
        self._ask = ask
        self._at = 0
        self._ahead: dict[int, tuple[StoreSession, Ahead]] = {}

    @property
    def current(self) -> B:
        """The batch whose turn it is."""
        return self.batches[self._at]

    def advance(self) -> None:
        """The next batch's turn."""
        self._ahead.pop(self._at, None)
        self._at += 1

    def answer(self, session: StoreSession) -> Ahead:
        """The current batch's question on this session, asked now unless it was ahead."""
        asked = self._ahead.pop(self._at, None)
        if asked is not None and asked[0] is session:
            return asked[1]
        return self._ask(session, self.current)

    def meanwhile(self, session: StoreSession) -> Callable[[], None]:
        """Asks for the next batch, if there is one."""
        following = self._at + 1

        def ask() -> None:
            if following < len(self.batches):
                with contextlib.suppress(OutOfTimeError):  # which is the next batch's affair
                    self._ahead[following] = (session, self._ask(session, self.batches[following]))

        return ask
