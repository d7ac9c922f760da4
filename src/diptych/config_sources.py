"""Fill configuration dataclasses from flags, the environment and a YAML file, in that order.

Every section has a name. A field `port` of section `router` is the flag `--port` of the commands
that take the section, the variable `DIPTYCH_ROUTER_PORT` and the YAML key `router.port`. Unknown
YAML keys and unknown variables of a known section are errors. Fields ending in `_bytes` take
suffixes (`512MiB`, `2GB`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from diptych.config import (
    EngineConfig,
    KVStoreConfig,
    KVTransferConfig,
    PlannerConfig,
    RedisConfig,
    RouterConfig,
    UpConfig,
    WorkerConfig,
)
from diptych.errors import ConfigError

SECTIONS: dict[str, type] = {
    "engine": EngineConfig,
    "redis": RedisConfig,
    "worker": WorkerConfig,
    "kvstore": KVStoreConfig,
    "router": RouterConfig,
    "planner": PlannerConfig,
    "up": UpConfig,
}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Settings:
    """The sections of one process, each a frozen dataclass."""

    def __init__(self, sections: dict[str, Any]) -> None:
        self._sections = sections

    def __getitem__(self, name: str) -> Any:
        return self._sections[name]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values, as a YAML file would hold them."""
        return {name: dataclasses.asdict(value) for name, value in self._sections.items()}


def add_flags(
    parser: argparse.ArgumentParser,
    *sections: str,
    without: Collection[str] = (),
    config_file: str | None = None,
) -> None:
    """One flag per field of the sections, with the help that stands beside the field's default.

    Args:
        without: fields, as `section.field`, that have no effect in this command.
        config_file: default of --config.
    """
    text = "YAML file with one mapping per section"
    parser.add_argument("--config", metavar="FILE", help=text, default=config_file)
    for section in sections:
        group = parser.add_argument_group(section)
        hints = get_type_hints(SECTIONS[section])
        for field in dataclasses.fields(SECTIONS[section]):
            if f"{section}.{field.name}" in without:
                continue
            flag = "--" + field.name.replace("_", "-")
            text = field.metadata.get("help", "").replace("%", "%%")
            if field.default is not dataclasses.MISSING and field.default is not None:
                text = f"{text} (default {field.default})"
            options: dict[str, Any] = {"dest": f"{section}.{field.name}", "default": None}
            if hints[field.name] in (bool, bool | None):
                group.add_argument(
                    flag, action=argparse.BooleanOptionalAction, help=text, **options
                )
            elif get_origin(hints[field.name]) is list:
                group.add_argument(flag, nargs="+", metavar="VALUE", help=text, **options)
            else:
                group.add_argument(flag, metavar="VALUE", help=text, **options)


def load(
    sections: tuple[str, ...],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_file: str | None = None,
) -> Settings:
    """The sections, filled and checked.

    Args:
        flags: `section.field` to value; None for flags that were not given.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one outside its range.
    """
    written = _read_yaml(config_file) if config_file else {}
    built = {}
    for section in sections:
        values = dict(written.get(section) or {})
        values.update(_from_environment(section, environment))
        for field in dataclasses.fields(SECTIONS[section]):
            given = flags.get(f"{section}.{field.name}")
            if given is not None:
                values[field.name] = given
        built[section] = build(SECTIONS[section], values, section)
    return Settings(built)


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """One dataclass from plain values.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value outside its range.
    """
    hints = get_type_hints(cls)
    unknown = sorted(str(name) for name in set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}")
    converted = {
        name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()
    }
    try:
        return cls(**converted)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold one mapping per section")
    unknown = sorted(str(name) for name in set(value) - set(SECTIONS))
    if unknown:
        raise ConfigError(
            f"{path}: unknown section {', '.join(unknown)}; known are {', '.join(SECTIONS)}"
        )
    for section, body in value.items():
        if body is not None and not isinstance(body, dict):
            raise ConfigError(f"{path}: section {section} must be a mapping")
        # A section that this command does not use is still checked: a typo must never be silent.
        build(SECTIONS[section], body or {}, section)
    return value


def _from_environment(section: str, environment: Mapping[str, str]) -> dict[str, str]:
    prefix = f"DIPTYCH_{section.upper()}_"
    names = {field.name for field in dataclasses.fields(SECTIONS[section])}
    found = {}
    for variable, value in environment.items():
        if variable.startswith(prefix):
            name = variable[len(prefix) :].lower()
            if name not in names:
                raise ConfigError(f"environment variable {variable}: {section} has no {name}")
            found[name] = value
    return found


def _convert(hint: Any, value: Any, where: str) -> Any:
    optional = get_origin(hint) in (typing.Union, types.UnionType)
    if optional:
        if value is None or value == "none":
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    kind = get_origin(hint) or hint
    if kind is KVTransferConfig:
        return build(KVTransferConfig, _mapping(value, where), where)
    if kind is dict:
        return _mapping(value, where)
    if kind is list:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        return [str(item) for item in items if item != ""]
    if kind is bool:
        return _boolean(value, where)
    if kind is int:
        return _integer(value, where)
    if kind is float:
        return _number(value, where)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{where} must be text, not {value!r}")
    return str(value)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, KVTransferConfig):
        return dataclasses.asdict(value)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} must be a JSON object: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{where} must be a JSON object, not {value!r}")
    return parsed


def _boolean(value: Any, where: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ConfigError(f"{where} must be true or false, not {value!r}")
    return words[str(value).lower()]


def _integer(value: Any, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(-?\d+)\s*([kmg]i?)?b?", str(value).strip().lower())
    if not match or (match[2] and not where.endswith("_bytes")):
        raise ConfigError(f"{where} must be a whole number, not {value!r}")
    return int(match[1]) * _SIZES[match[2] or ""]


def _number(value: Any, where: str) -> float:
    try:
        number = float(value)
        if isinstance(value, bool) or not math.isfinite(number):
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(f"{where} must be a number, not {value!r}") from None
    return number
