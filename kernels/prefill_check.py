"""A small awkward prefill, by a backend and by the reference, before the backend may serve."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.kernels import reference
from diptych.kernels.attention_spec import AttentionSpec, PrefillAttention, WrongBackendError

# A token, a whole prompt, a chunk after a prefix, nothing this step, and one past a tile.
QUERIES = (1, 70, 33, 0, 129)
LENGTHS = (1, 70, 300, 17, 131)
TOLERANCE = 2e-2


@torch.inference_mode()
def check_prefill(attend: PrefillAttention, spec: AttentionSpec, device: torch.device) -> None:
    """Compare over scrambled pages of the engine's layout; what no sequence owns is NaN.

    Raises:
        WrongBackendError: the backend fails, or its answer differs from the reference's.
    """
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache, tables = (x.to(device) for x in _make_cache(spec, generator))
    q = torch.randn(sum(QUERIES), spec.num_heads, spec.head_dim, generator=generator)
    q = q.to(device, spec.dtype)
    starts = torch.tensor((0, *QUERIES), device=device).cumsum(0).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    scale, window = spec.head_dim**-0.5, spec.sliding_window
    args = (q, k_cache, v_cache, tables, starts, lengths, scale, window, max(QUERIES))
    try:
        ours = attend(*args).float()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    # whatever an extension or a compiler raises, another backend can serve
    except Exception as error:
        raise WrongBackendError(f"it fails: {error}") from error
    difference = (ours - reference.paged_prefill_attention(*args).float()).abs().max().item()
    # NaN is not below it
    if not difference < TOLERANCE:
        raise WrongBackendError(f"it differs from the reference by {difference:.3g}")


def _make_cache(spec: AttentionSpec, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The second of two layers, and block tables."""
    size, heads, dim = spec.block_size, spec.num_kv_heads, spec.head_dim
    counts = [-(-length // size) for length in LENGTHS]
    shape = (sum(counts) + 1, heads, 2, 2, size, dim)
    kv = torch.full(shape, torch.nan, dtype=torch.float32)
    # entries past a sequence's own are block 0, which is nobody's
    tables = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    blocks = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
    for i, length in enumerate(LENGTHS):
        for j in range(counts[i]):
            tables[i, j] = block = next(blocks)
            count = min(size, length - j * size)
            tokens = torch.randn(heads, 2, count, dim, generator=generator)
            kv[block, :, 1, :, :count] = tokens
    kv = kv.to(spec.kv_dtype)
    return kv[:, :, 1, 0], kv[:, :, 1, 1], tables
