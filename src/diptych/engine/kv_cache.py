"""The KV cache: how many blocks fit, and their memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from diptych.config import GIB, MIB, EngineConfig
from diptych.connectors.base import KVLayout
from diptych.connectors.transports.memory import HostMemory
from diptych.errors import ConfigError

# CUDA context, cuBLAS workspaces and fragmentation, which the allocator does not count
_GPU_OVERHEAD_BYTES = 768 * MIB


def block_bytes(layout: KVLayout) -> int:
    """Bytes of one block over all layers."""
    return math.prod(layout.shape[1:]) * torch_dtype(layout).itemsize


def torch_dtype(layout: KVLayout) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return dtype


def allocate(layout: KVLayout, device: torch.device) -> Tensor:
    """The cache, `layout.shape`, zero.

    Raises:
        ConfigError: there is not that much memory.
    """
    dtype = torch_dtype(layout)
    size = layout.num_blocks * block_bytes(layout)
    try:
        if device.type != "cpu":
            return torch.zeros(layout.shape, dtype=dtype, device=device)
        # numpy's zeros are fresh pages, taken when first written; torch's are written at once
        raw = np.zeros(size, np.uint8)
    except (MemoryError, ValueError, torch.OutOfMemoryError):
        raise _too_large(layout, size, device) from None
    return torch.from_numpy(raw).view(dtype).view(layout.shape)


def allocate_shared(layout: KVLayout, device: torch.device) -> tuple[Tensor, KVLayout]:
    """As `allocate`, and the layout that says where: on a CPU in a memfd, as fresh as other pages,
    which peers of this host can map.

    Raises:
        ConfigError: there is not that much memory.
    """
    if device.type != "cpu":
        return allocate(layout, device), layout
    size = layout.num_blocks * block_bytes(layout)
    try:
        memory = HostMemory.shared(size)
    except (OSError, ValueError):
        raise _too_large(layout, size, device) from None
    tensor = torch.from_numpy(memory.array).view(torch_dtype(layout)).view(layout.shape)
    return tensor, replace(layout, memfd=memory.fd)


def _too_large(layout: KVLayout, size: int, device: torch.device) -> ConfigError:
    return ConfigError(
        f"a KV cache of {layout.num_blocks} blocks, {size / GIB:.1f} GiB, does not fit {device}"
    )


def cpu_kv_bytes(config: EngineConfig) -> tuple[int, str]:
    """The budget, and how it comes about."""
    size = config.cpu_kv_cache_bytes
    return size, f"cpu_kv_cache_bytes = {size / MIB:.0f} MiB"


def gpu_kv_bytes(config: EngineConfig, device: torch.device, peak_bytes: int) -> tuple[int, str]:
    """The budget, and how it comes about; `peak_bytes` is the most a step needs without KV."""
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * config.gpu_memory_utilization)
    size = share - peak_bytes - _GPU_OVERHEAD_BYTES
    room = free - _GPU_OVERHEAD_BYTES // 2  # others may have taken what our share counts on
    text = (
        f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB, less "
        f"{peak_bytes / GIB:.1f} GiB for weights and activations and "
        f"{_GPU_OVERHEAD_BYTES / GIB:.1f} GiB of overhead, at most {room / GIB:.1f} GiB free, "
        f"= {min(size, room) / GIB:.1f} GiB"
    )
    return min(size, room), text


def num_kv_blocks(
    config: EngineConfig, layout: KVLayout, max_model_len: int, budget_bytes: int, budget: str
) -> int:
    """The blocks of the cache: as configured, else what the budget holds.

    Raises:
        ConfigError: one request of `max_model_len` tokens does not fit, with the arithmetic.
    """
    each = block_bytes(layout)
    if config.num_kv_blocks is not None:
        count, source = config.num_kv_blocks, f"num_kv_blocks = {config.num_kv_blocks}"
    else:
        count, source = max(budget_bytes, 0) // each, budget
    needed = -(-max_model_len // layout.block_size)
    if count < needed:
        or_shorter = f" or set max_model_len to {count * layout.block_size} or less"
        raise ConfigError(
            f"the KV cache does not fit max_model_len {max_model_len}: that takes {needed} blocks "
            f"of {layout.block_size} tokens, {each / MIB:.2f} MiB each, {needed * each / MIB:.0f} "
            f"MiB in all, but there are {count} ({source}); raise the budget"
            f"{or_shorter if count else ''}"
        )
    return count
