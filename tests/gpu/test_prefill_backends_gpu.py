"""The backends of prefill attention, on the device they are for."""

import importlib.util

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels.attention_spec import AttentionSpec
from diptych.kernels.dispatch import select_ops
from diptych.kernels.fa3_prefill_attention import MODULE, Fa3Prefill
from diptych.kernels.hopper_prefill_attention import HopperPrefill
from diptych.kernels.paged_prefill_attention import paged_prefill_attention
from diptych.kernels.prefill_check import check_prefill

DEVICE = torch.device("cuda")
LLAMA = AttentionSpec(torch.bfloat16, torch.bfloat16, 32, 8, 128, 64)
needs_fa3 = pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="no FA3 package")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@needs_fa3
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_fa3_passes_the_check(dim, block_size, window) -> None:
    spec = AttentionSpec(torch.bfloat16, torch.bfloat16, 8, 2, dim, block_size, window)
    check_prefill(Fa3Prefill(spec, DEVICE), spec, DEVICE)


@needs_fa3
def test_fa3_is_chosen_when_forced() -> None:
    assert isinstance(select_ops(DEVICE, "fa3", LLAMA).paged_prefill_attention, Fa3Prefill)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_our_kernel_is_chosen_where_it_fits(name) -> None:
    assert isinstance(select_ops(DEVICE, name, LLAMA).paged_prefill_attention, HopperPrefill)


def test_the_kernel_that_takes_any_serves_the_rest() -> None:
    spec = AttentionSpec(torch.float32, torch.float32, 9, 3, 80, 16)
    assert select_ops(DEVICE, "auto", spec).paged_prefill_attention is paged_prefill_attention
