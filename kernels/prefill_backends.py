"""Choose who computes prefill attention on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from diptych.errors import ConfigError
from diptych.kernels.attention_spec import (
    AttentionSpec,
    PrefillAttention,
    UnfitBackendError,
    WrongBackendError,
)
from diptych.kernels.fa3_prefill_attention import Fa3Prefill
from diptych.kernels.paged_prefill_attention import paged_prefill_attention
from diptych.kernels.prefill_check import check_prefill

_log = logging.getLogger(__name__)


def choose_prefill(
    device: torch.device, name: str, spec: AttentionSpec | None = None
) -> PrefillAttention:
    """The fastest backend that fits and that a check at start finds right.

    Args:
        name: `auto`, or one of `triton` and `fa3` to be forced.
        spec: of the calls to come; without it only the kernel that takes any is chosen.

    Raises:
        ConfigError: the backend that is forced does not fit, or is wrong here.
    """
    if name == "fa3" and spec is None:
        raise ConfigError("attention_backend fa3 needs to know the model's heads")
    if spec is None:
        return paged_prefill_attention
    for candidate, make in CANDIDATES:
        if name not in ("auto", candidate):
            continue
        try:
            attend = make(spec, device)
            check_prefill(attend, spec, device)
        except UnfitBackendError as error:
            if name == "fa3":
                raise ConfigError(f"attention_backend fa3 cannot serve: {error}") from error
            level = logging.WARNING if isinstance(error, WrongBackendError) else logging.INFO
            _log.log(level, "prefill attention is not by %s: %s", make.__name__, error)
        else:
            _log.info("prefill attention is by %s", make.__name__)
            return attend
    return paged_prefill_attention


def hopper_prefill(spec: AttentionSpec, device: torch.device) -> PrefillAttention:
    """Our kernel for one kind of GPU.

    Raises:
        UnfitBackendError: device or specification rule it out, or the experimental part of Triton
            that it is written in is not as expected.
    """
    try:
        from diptych.kernels.hopper_prefill_attention import HopperPrefill
    except (ImportError, AttributeError) as error:
        raise UnfitBackendError(f"this Triton cannot compile it: {error}") from error
    return HopperPrefill(spec, device)


# Best first (docs/decisions/0003-attention-tiles.md).
CANDIDATES: tuple[tuple[str, Callable[[AttentionSpec, torch.device], PrefillAttention]], ...] = (
    ("triton", hopper_prefill),
    ("fa3", Fa3Prefill),
)
