"""Weights of e4m3: which of a model's, and how a checkpoint stores them.

The field writes them in two ways, which differ in names alone: `quant_method` fp8 (Hugging Face;
`weight_scale_inv` for squares of 128) and compressed-tensors (`weight_scale`). Activations are
always rounded as they come, by row: a checkpoint's fixed scales for them are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.errors import ModelLoadError
from diptych.kernels.fp8_tensor import TILE
from diptych.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Which matrices are e4m3.

    Attributes:
        stored: the checkpoint holds e4m3; else its weights are rounded when loaded.
        tiled: scales are of squares of TILE; else of rows.
        ignored: modules that stay as they are: names, their prefixes, or `re:` expressions.
    """

    stored: bool = False
    tiled: bool = False
    ignored: tuple[str, ...] = ()

    def covers(self, modules: Sequence[str]) -> bool:
        """Whether the weights of `model.layers.0.mlp.down_proj`, say, are e4m3.

        Raises:
            ModelLoadError: some of them, which are to be one matrix.
        """
        kept = [m for m in modules if any(_matches(pattern, m) for pattern in self.ignored)]
        if kept and len(kept) != len(modules):
            raise ModelLoadError(f"{kept[0]} is not quantised, but others of {modules} are")
        return not kept


def choose_scheme(quantization: str | None, model: ModelConfig) -> Fp8Scheme | None:
    """What the flag and the checkpoint say; None: weights are of the type to compute in.

    Raises:
        ModelLoadError: the checkpoint is quantised in a way that is not supported.
    """
    if model.quantization is not None:
        return _scheme_of(model.quantization, str(model.path))
    return None if quantization is None else Fp8Scheme()


def _scheme_of(raw: Mapping[str, Any], where: str) -> Fp8Scheme:
    method = raw.get("quant_method")
    try:
        if method == "fp8":
            return _of_hugging_face(raw)
        if method == "compressed-tensors":
            return _of_compressed_tensors(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{where} has weights quantised by {method} in a way that is not supported: {error}"
        ) from error
    raise ModelLoadError(
        f"{where} has weights quantised by {method}: not supported; supported are fp8 and "
        "compressed-tensors with weights of fp8"
    )


def _of_hugging_face(raw: Mapping[str, Any]) -> Fp8Scheme:
    if (kind := raw.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt is {kind}, not e4m3")
    ignored = [*(raw.get("modules_to_not_convert") or ()), *(raw.get("ignored_layers") or ())]
    return Fp8Scheme(True, _is_tiled(raw.get("weight_block_size")), _patterns(ignored))


def _of_compressed_tensors(raw: Mapping[str, Any]) -> Fp8Scheme:
    groups = list(raw["config_groups"].values())
    if len(groups) != 1 or list(groups[0]["targets"]) != ["Linear"]:
        raise ValueError("config_groups is not one group for all Linear")
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    for part in (weights, inputs) if inputs else (weights,):
        if (part["type"], part["num_bits"]) != ("float", 8):
            raise ValueError(f"it has {part['type']} of {part['num_bits']} bits")
    if (strategy := weights["strategy"]) not in ("tensor", "channel", "block"):
        raise ValueError(f"the strategy is {strategy}, not tensor, channel or block")
    block = weights.get("block_structure") if strategy == "block" else None
    return Fp8Scheme(True, _is_tiled(block), _patterns(raw.get("ignore") or ()))


def _patterns(ignored: Sequence[object]) -> tuple[str, ...]:
    for pattern in ignored:
        if not isinstance(pattern, str):
            raise ValueError(f"{pattern!r} is no name of a module")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"{pattern!r} is no expression: {error}") from error
    return tuple(str(pattern) for pattern in ignored)


def _is_tiled(block: Sequence[int] | None) -> bool:
    if block is not None and list(block) != [TILE, TILE]:
        raise ValueError(f"squares are of {list(block)}, not {TILE}")
    return block is not None


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
