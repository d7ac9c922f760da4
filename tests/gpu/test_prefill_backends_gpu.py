"""The backends of prefill attention, on the device they are for."""

import importlib.util

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels.attention_spec import AttentionSpec
from diptych.kernels.dispatch import select_ops
from diptych.kernels.fa3_prefill_attention import MODULE, Fa3Prefill
from diptych.kernels.prefill_check import check_prefill

DEVICE = torch.device("cuda")
needs_fa3 = pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="no FA3 package")


@needs_fa3
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_fa3_passes_the_check(dim, block_size, window) -> None:
    spec = AttentionSpec(torch.bfloat16, torch.bfloat16, 8, 2, dim, block_size, window)
    check_prefill(Fa3Prefill(spec, DEVICE), spec, DEVICE)


@needs_fa3
def test_fa3_is_chosen_when_forced() -> None:
    spec = AttentionSpec(torch.bfloat16, torch.bfloat16, 32, 8, 128, 64)
    assert isinstance(select_ops(DEVICE, "fa3", spec).paged_prefill_attention, Fa3Prefill)
