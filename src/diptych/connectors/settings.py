"""A connector's settings out of `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import Any

from diptych.errors import ConfigError


def fields_of(cls: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of `settings` that are fields of a dataclass, of the types that its defaults have.

    Raises:
        ConfigError: one has the wrong type.
    """
    values = {}
    for field in dataclasses.fields(cls):
        if field.name not in settings:
            continue
        value, kind = settings[field.name], type(field.default)
        numeric = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not numeric:
            raise ConfigError(f"{field.name} must be a {kind.__name__}, not {value!r}")
        values[field.name] = value
    return values
