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
