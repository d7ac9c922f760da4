"""Kernels that start before the one before them has ended, on GPUs that allow it (Hopper, later).

Such a kernel is launched with `early_start(device)`. It lets the next one start at once, does what
depends on nothing but weights, and waits for the earlier ones before it touches anything that they
read or write. In a captured step that hides what lies between kernels. A step whose kernels come
from the host has nothing to hide: outside of `starting_early()` launches are ordinary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl

_wanted = ContextVar("starting_early", default=False)


@triton.jit
def let_next_kernel_start():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_earlier_kernels():
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@contextmanager
def starting_early() -> Iterator[None]:
    """Around the trial and the capture of a step: its kernels may start early."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel takes `EARLY`."""
    if _wanted.get() and _can(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@functools.cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
