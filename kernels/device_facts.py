"""What launchers ask of a device, once."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the interpreter: a few, so that work is split there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether it has an instruction from e4m3 to float16."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
