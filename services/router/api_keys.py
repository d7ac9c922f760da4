"""Who may use the API: keys from a file, read again when it changes, compared by digest."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from pathlib import Path

from diptych.clock import Clock
from diptych.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

_RELOAD_EVERY_S = 1.0


class ApiKeys:
    """The keys of one file, one `name:key` a line; without a file everybody may.

    A file that becomes unreadable leaves the old keys in force.

    Raises:
        ConfigError: (from `__init__`) the file cannot be read or is malformed.
    """

    def __init__(self, path: str | None, clock: Clock) -> None:
        self._path = None if path is None else Path(path)
        self._clock = clock
        self._digests: dict[str, bytes] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._checked_at = clock.monotonic()
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._digests = _read(self._path)

    def check(self, authorization: str | None) -> str | None:
        """The name that the header `Authorization: Bearer KEY` stands for; None without a file.

        Raises:
            AuthenticationError: the key is missing or unknown.
        """
        if self._path is None:
            return None
        self._refresh(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("an API key is needed: Authorization: Bearer KEY")
        digest = _digest(key.strip())
        found = None
        for name, known in self._digests.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise AuthenticationError("the API key is not valid")
        return found

    def _refresh(self, path: Path) -> None:
        now = self._clock.monotonic()
        if now - self._checked_at < _RELOAD_EVERY_S:
            return
        self._checked_at = now
        try:
            stamp = _stamp(path)
            if stamp != self._stamp:
                self._digests, self._stamp = _read(path), stamp
                logger.info("%d API keys read", len(self._digests))
        except ConfigError as error:
            logger.warning("API keys keep their old values: %s", error)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise ConfigError(f"API keys {path} cannot be read: {error}", param="api_keys") from error
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _read(path: Path) -> dict[str, bytes]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"API keys {path} cannot be read: {error}", param="api_keys") from error
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, key = line.strip().partition(":")
        if not name or not key:
            raise ConfigError(f"{path} line {number} is not name:key", param="api_keys")
        if name in digests:
            raise ConfigError(f"{path} line {number} repeats the name {name}", param="api_keys")
        digests[name] = _digest(key)
    return digests
