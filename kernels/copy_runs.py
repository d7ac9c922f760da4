"""Copy scattered runs of bytes between two memories that this GPU reaches: its own, and another's
of the same host that is mapped here.

The GPU's copy engines take one run after another, and each costs microseconds; one kernel keeps
many loads of many runs in flight, so that runs of a few KiB move at the speed of the link.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

# a program takes whole runs: a few that are longer than this would keep few programs busy
PIECE_BYTES = 128 << 10
_UNIT_BYTES = 16
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 10, 16 << 10
_NARROW_BLOCK_BYTES = 4 << 10
# enough loads in flight for NVLink (400 GB/s times 2 us), with room for what else runs
_IN_FLIGHT_BYTES = 4 << 20
_MIN_PROGRAMS, _MAX_PROGRAMS = 32, 1024


@triton.jit(
    do_not_specialize=["source", "target", "num_runs"],
    do_not_specialize_on_alignment=["runs"],
)
def _copy_runs_kernel(
    source,
    target,
    runs,
    num_runs,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # elements of 4 bytes at multiples of 16, or single bytes anywhere
    UNIT: tl.constexpr = 4 if WIDE else 1
    if WIDE:
        p_source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        p_target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    else:
        p_source = source.to(tl.pointer_type(tl.int8))
        p_target = target.to(tl.pointer_type(tl.int8))
    o = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        p_from = p_source + tl.load(runs + i) * UNIT
        p_to = p_target + tl.load(runs + num_runs + i) * UNIT
        length = tl.load(runs + 2 * num_runs + i) * UNIT
        for start in range(0, length, BLOCK):
            mask = start + o < length
            b = tl.load(p_from + start + o, mask=mask)
            tl.store(p_to + start + o, b, mask=mask)


def copy_runs(
    source: int,
    target: int,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    length: NDArray[np.int64],
    device: torch.device,
) -> None:
    """Copy run i, `length[i]` bytes at `source + src[i]`, to `target + dst[i]`, on the current
    stream of `device`.

    Args:
        source, target: addresses of memory that the device reaches.
        src, dst, length: int64 `[n]`, n at least 1, lengths positive and better not above
            `PIECE_BYTES`; no two targets overlap.
    """
    bits = source | target | int(np.bitwise_or.reduce(src | dst | length))
    wide = bits % _UNIT_BYTES == 0
    runs = np.stack([src, dst, length])
    block_bytes = triton.next_power_of_2(int(length.max())) if wide else _NARROW_BLOCK_BYTES
    block_bytes = min(max(block_bytes, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    table = torch.from_numpy(runs // _UNIT_BYTES if wide else runs)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    num_runs = table.shape[1]
    programs = min(max(_IN_FLIGHT_BYTES // block_bytes, _MIN_PROGRAMS), _MAX_PROGRAMS)
    _copy_runs_kernel[(min(num_runs, programs),)](
        source,
        target,
        table,
        num_runs,
        WIDE=wide,
        BLOCK=block_bytes // 4 if wide else block_bytes,
        # four loads of 16 bytes a thread; two for small runs
        num_warps=max(1, block_bytes >> 11),
    )
