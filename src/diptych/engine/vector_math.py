"""Makes torch's elementary functions on a CPU reliable from their first call on."""

from __future__ import annotations

import torch

_FUNCTIONS = ("cos", "erf", "exp", "expm1", "log", "log1p", "log2", "sin", "sqrt", "tanh")


def settle_vector_math() -> None:
    """Call each function once, on one element.

    oneMKL chooses the kernel of a function at its first call; where several threads make that call
    at once, one of them may run a kernel of half the digits (pytorch/pytorch#188792), and a RoPE
    table or the noise of a sample would differ between two processes by 1e-4.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
