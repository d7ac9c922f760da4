"""A connector's settings out of `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

from diptych.errors import ConfigError


def fields_of(cls: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of `settings` that are fields of a dataclass, of the types that those have.

    Raises:
        ConfigError: one has the wrong type.
    """
    values = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in settings:
            continue
        value, hint = settings[field.name], hints[field.name]
        kinds = get_args(hint) or (hint,)
        numeric = float in kinds and isinstance(value, int) and not isinstance(value, bool)
        if type(value) not in kinds and not numeric:
            raise ConfigError(f"{field.name} must be a {kinds[0].__name__}, not {value!r}")
        values[field.name] = value
    return values
