"""The kernel benchmark says what it needs, and what its figures are measured against."""

import argparse

import pytest
import torch

from diptych.bench import kernel_times, kernels
from diptych.errors import ConfigError


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(list(flags))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        kernels.main(parse())


def test_every_case_can_be_called_and_has_a_floor(monkeypatch) -> None:
    """On the CPU, with the torch ops and a small shape of each case."""
    from diptych.kernels.torch_ops import TorchOps

    device, ops = torch.device("cpu"), TorchOps()
    monkeypatch.setattr(kernel_times, "LINEARS", {"out": ("linear_parts", 96, 64)})
    monkeypatch.setattr(kernel_times, "FP8_LINEARS", {"out": ("fp8_linear_parts", 96, 64)})
    cases = [
        kernel_times._decode_case(ops.paged_decode_attention, "decode", 2, 100, 16, 1, device),
        kernel_times._prefill_case(ops.paged_prefill_attention, "prefill", 2, 70, 64, 1, device),
        kernel_times._linear_case(ops, "out", 3, device),
        kernel_times._fp8_linear_case(ops, "out", 3, device),
        *kernel_times._sampling_cases(ops, 3, 3000, device),
        *kernel_times._elementwise_cases(ops, 3, device),
    ]
    with torch.inference_mode():
        for case in cases:
            case.call()
            assert case.bytes > 0
