"""A JSON object of a client, read field by field: wrong types are named, null means absent."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from diptych.errors import InvalidRequestError

INT32_MAX = 2**31 - 1
MAX_LIST_ITEMS = 4096


class JsonBody:
    """One request body.

    Every reader returns None where the field is absent or null.

    Raises:
        InvalidRequestError: (from `parse` and the readers) not JSON, or a field of the wrong type.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def parse(cls, body: bytes) -> JsonBody:
        """Decode a body, which must be one JSON object in UTF-8."""
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise InvalidRequestError("the body must be a JSON object")
        return cls(value)

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def string(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is None or isinstance(value, str):
            return value
        raise _wrong(name, "a string")

    def boolean(self, name: str) -> bool | None:
        value = self._fields.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong(name, "true or false")

    def integer(self, name: str, *, least: int = -INT32_MAX, most: int = INT32_MAX) -> int | None:
        """An integer; 5.0 counts as one."""
        value = self._fields.get(name)
        return None if value is None else _integer(name, value, least, most)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._fields.get(name)
        return None if value is None else _number(name, value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self._fields.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise _wrong(name, "an object")

    def strings(self, name: str) -> list[str] | None:
        """A list of strings."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(name, "a list of strings")
        _check_count(name, value)
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise _wrong(name, "a list of integers")
        _check_count(name, value)
        return [_integer(name, item, -INT32_MAX, INT32_MAX) for item in value]

    def number_by_token(self, name: str) -> dict[int, float] | None:
        """An object whose keys are token ids in decimal."""
        value = self.object(name)
        if value is None:
            return None
        try:
            found = {int(key): _number(name, item) for key, item in value.items()}
        except ValueError:
            raise _wrong(name, "an object of token id to number") from None
        if any(abs(key) > INT32_MAX for key in found):
            raise _wrong(name, "an object of token id to number")
        _check_count(name, list(found))
        return found


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_integer(value):
        raise _wrong(name, "an integer")
    if not least <= value <= most:
        raise InvalidRequestError(f"{name} must be in [{least}, {most}]", param=name)
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, "a finite number")
    return number


def _check_count(name: str, items: list[Any]) -> None:
    if len(items) > MAX_LIST_ITEMS:
        raise InvalidRequestError(f"{name} must have at most {MAX_LIST_ITEMS} items", param=name)


def _wrong(name: str, kind: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {kind}", param=name)
