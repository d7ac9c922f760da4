"""What vLLM reached on the same machine, and what Diptych wants to reach there.

vLLM 0.26.0 with its defaults (asynchronous scheduling, FA3, CUDA graphs, torch.compile) on one
NVIDIA H200, torch 2.11.0+cu130, 2026-11-29: Llama-3.1-8B's shape, bfloat16, random weights,
temperature 0, `ignore_eos`, prefix caching off, `gpu_memory_utilization` 0.9. Same definitions as
here (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import NamedTuple

NAME = "vLLM 0.26.0"
DEVICE = "H200"
MODEL = "shape:llama-3.1-8b"


class Figure(NamedTuple):
    """What the peer reached, our goal, and what honest work may reach beyond it."""

    peer: float
    goal: float
    stretch: float


# milliseconds by (prompts, tokens of each)
PREFILL_MS = {
    (1, 1024): Figure(26.6, 24.0, 22.0),
    (1, 8192): Figure(210.0, 202.0, 192.0),
    (1, 32000): Figure(1143.0, 1110.0, 1070.0),
    # 43.6k, 45.5k and 48k tokens/s
    (16, 1024): Figure(375.8, 360.1, 341.3),
}
# milliseconds per output token by (batch, context)
TPOT_MS = {
    (1, 1024): Figure(4.985, 4.45, 4.2),
    (8, 1024): Figure(5.294, 4.75, 4.5),
    (32, 1024): Figure(6.368, 5.9, 5.6),
    (64, 1024): Figure(7.673, 7.25, 6.95),
    (128, 1024): Figure(10.776, 9.8, 9.4),
    (256, 1024): Figure(18.226, 16.6, 15.9),
    (8, 8192): Figure(6.928, 6.5, 6.25),
    (32, 8192): Figure(13.134, 13.0, 12.75),
    (4, 32000): Figure(8.729, 8.6, 8.35),
}
# milliseconds of a batch by (requests, prompt tokens, output tokens)
LATENCY_MS = {(8, 32, 128): Figure(653.0, 600.0, 570.0)}
# seconds: imports beyond torch's, and until the engine is ready (the peer's compile was cold)
IMPORTS_S = Figure(18.7, 1.0, 0.5)
READY_S = Figure(139.0, 20.0, 10.0)
# tokens/s by (requests, prompt tokens, output tokens): all tokens, and output tokens
TOTAL_TOKENS_PER_S = {(1000, 1024, 128): Figure(35300.0, 38000.0, 41000.0)}
OUTPUT_TOKENS_PER_S = {(1000, 256, 256): Figure(14050.0, 15200.0, 16500.0)}


def applies(model: str, dtype: str, device: str) -> bool:
    """Whether these figures are of this model, as the flags name it, on this torch device."""
    if model != MODEL or dtype not in ("auto", "bfloat16") or not device.startswith("cuda"):
        return False
    import torch

    return DEVICE in torch.cuda.get_device_name(device)
