"""Host memory of others that a GPU may reach directly: pools that this process has mapped.

Registering a pool takes its time (its pages must exist), so a thread does it; until then, and for
memory that is not covered, copies go through a pinned buffer of one's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pool:
    view: memoryview
    bytes: Tensor  # `[num_bytes]` uint8 over the pool
    start: int
    registered: bool = False
    wanted: bool = True


class PinnedPools:
    """For one GPU. `tensor` may be asked by any thread; `keep_only` by the one that transfers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pools: list[_Pool] = []

    def keep_only(self, views: Sequence[memoryview]) -> None:
        """These are the pools now, whole and writable; nothing of another is being copied."""
        wanted = [_address(view) for view in views]
        if wanted == [pool.start for pool in self._pools]:
            return
        known = {pool.start: pool for pool in self._pools}
        for start, pool in known.items():
            if start not in wanted:
                self._drop(pool)
        pools = []
        for start, view in zip(wanted, views, strict=True):
            pools.append(known[start] if start in known else self._begin(view, start))
        self._pools = pools

    def tensor(self, view: memoryview) -> Tensor | None:
        """`[num_bytes]` uint8 over the view's memory, if the GPU reaches it directly."""
        start = _address(view)
        for pool in self._pools:
            offset = start - pool.start
            if pool.registered and 0 <= offset <= pool.view.nbytes - view.nbytes:
                return pool.bytes[offset : offset + view.nbytes]
        return None

    def _begin(self, view: memoryview, start: int) -> _Pool:
        pool = _Pool(view, torch.frombuffer(view, dtype=torch.uint8), start)
        threading.Thread(target=self._register, args=(pool,), name="kv-pin", daemon=True).start()
        return pool

    def _register(self, pool: _Pool) -> None:
        try:
            with torch.cuda.device(self._device):
                code = int(_cudart().cudaHostRegister(pool.start, pool.view.nbytes, 0))
        except Exception:
            logger.exception("a store's pool cannot be pinned: slower copies")
            return
        with self._lock:
            if code:
                logger.warning("a store's pool cannot be pinned (error %d): slower copies", code)
            elif pool.wanted:
                pool.registered = True
                logger.info("pinned %d MiB of a store's pool", pool.view.nbytes >> 20)
            else:
                _cudart().cudaHostUnregister(pool.start)

    def _drop(self, pool: _Pool) -> None:
        with self._lock:
            pool.wanted = False
            if pool.registered:
                pool.registered = False
                _cudart().cudaHostUnregister(pool.start)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
