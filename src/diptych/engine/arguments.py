"""Keyword arguments of `LLM` and `AsyncLLM` to an `EngineConfig`; no torch here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from diptych.config import EngineConfig, KVTransferConfig
from diptych.errors import ConfigError, UnsupportedFeatureError

logger = logging.getLogger(__name__)

_HINTS = get_type_hints(EngineConfig)
# Arguments of the field that change nothing here, whatever their value.
_WITHOUT_EFFECT = frozenset(
    {
        "cpu_offload_gb",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "enable_log_requests",
        "max_seq_len_to_capture",
        "swap_space",
        "trust_remote_code",
    }
)
# Arguments of the field that this version knows with these values only.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "enable_chunked_prefill": (True, None),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "task": ("auto", "generate"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
}


def engine_config(model: str, arguments: Mapping[str, Any]) -> EngineConfig:
    """The configuration that these arguments mean.

    Raises:
        ConfigError: an argument is unknown or has no valid value.
        UnsupportedFeatureError: the value is known in the field, not in this version.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in known:
            values[name] = value
        elif name in _ONLY:
            _require_supported(model, name, value)
        elif name in _WITHOUT_EFFECT:
            logger.debug("%s has no effect", name)
        else:
            raise ConfigError(f"unknown argument {name!r}", param=name)
    values["kv_transfer_config"] = _kv_transfer_config(values.get("kv_transfer_config"))
    values["dtype"] = _dtype_name(values.get("dtype", "auto"))
    if values.get("seed") is None:
        values.pop("seed", None)
    for name, value in values.items():
        _require_type(name, value)
    return EngineConfig(model=str(model), **values)


def _require_type(name: str, value: Any) -> None:
    """
    Raises:
        ConfigError: the value is of no type that the field takes.
    """
    hint = _HINTS[name]
    allowed = get_args(hint) or (hint,)
    if isinstance(value, bool):
        fits = bool in allowed
    elif isinstance(value, int):
        fits = int in allowed or float in allowed
    else:
        fits = isinstance(value, allowed)
    if not fits:
        named = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ConfigError(f"{name} must be {named}, not {value!r}", param=name)


def _require_supported(model: str, name: str, value: Any) -> None:
    allowed = _ONLY[name]
    if value in allowed or (name == "tokenizer" and value == model):
        return
    raise UnsupportedFeatureError(
        f"{name}={value!r} is not supported in this version, only {allowed[0]!r}", param=name
    )


def _kv_transfer_config(value: Any) -> KVTransferConfig | None:
    if value is None or isinstance(value, KVTransferConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            "kv_transfer_config must be a KVTransferConfig", param="kv_transfer_config"
        )
    try:
        return KVTransferConfig(**value)
    except TypeError as error:
        raise ConfigError(f"kv_transfer_config: {error}", param="kv_transfer_config") from error


def _dtype_name(value: Any) -> str:
    """`torch.float32` and "float" are "float32", "half" is "float16"."""
    name = str(value).removeprefix("torch.")
    return {"float": "float32", "half": "float16"}.get(name, name)
