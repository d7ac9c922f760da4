"""Choose who computes prefill attention on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from diptych.errors import ConfigError
from diptych.kernels.attention_spec import AttentionSpec, PrefillAttention, UnfitBackendError
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
    for candidate, make in _candidates(name):
        try:
            attend = make(spec, device)
            check_prefill(attend, spec, device)
        except UnfitBackendError as error:
            if name == candidate == "fa3":
                raise ConfigError(f"attention_backend {name} cannot serve: {error}") from error
            _log.info("prefill attention is not by %s: %s", candidate, error)
        else:
            _log.info("prefill attention is by %s", candidate)
            return attend
    return paged_prefill_attention


def _candidates(
    name: str,
) -> Iterator[tuple[str, Callable[[AttentionSpec, torch.device], PrefillAttention]]]:
    """Best first."""
    if name in ("auto", "fa3"):
        yield "fa3", Fa3Prefill
