"""Between the paged KV cache and canonical objects: bytes only, whatever the dtype.

The cache is seen as `[num_blocks, H_kv, L, 2, block_size, D * item_bytes]` of uint8, an object as
`[H_kv, L, 2, tokens, D * item_bytes]`. On a CPU both are numpy arrays: one thread copies, where
torch would start a second pool of threads. On a GPU they are tensors; gathering runs on a stream of
its own, and copies from and to the host on one of the thread that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.connectors.pages import BlockRun, TokenRange, block_runs
from diptych.connectors.pinned_pool import PinnedPools
from diptych.connectors.store_move import Begun

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bytes = NDArray[np.uint8] | Tensor


# objects of one piece of memory, which is free only when all of them are
_GATHERED_AT_ONCE = 16


class CacheCopier:
    """Gathers objects from one KV cache and scatters them back."""

    def __init__(self, kv_cache: Tensor) -> None:
        """`kv_cache`: `[num_blocks, H_kv, L, 2, block_size, D]`, contiguous."""
        raw = kv_cache.view(torch.uint8)
        self._on_gpu = raw.device.type == "cuda"
        self._cache: Any = raw if self._on_gpu else raw.numpy()
        self._block_size = int(raw.shape[4])
        self._device = raw.device
        self._local = threading.local()
        self._pools = PinnedPools(raw.device) if self._on_gpu else None
        self._gathers = _side_stream_of(raw.device, priority=-1) if self._on_gpu else None
        heads, layers, _, _, row = raw.shape[1:]
        self._shape = (int(heads), int(layers), 2, -1, int(row))
        # the same bytes as `[num_blocks, words]`: what a kernel copies best
        self._words = raw.view(raw.shape[0], -1)
        if self._words.shape[1] % 8 == 0:
            self._words = self._words.view(torch.int64)
        self.token_bytes = int(heads * layers * 2 * row)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what was gathered, for `fetch`; None on a CPU. The model's stream goes on
        behind it: the blocks may be another's from its next step on."""
        if self._gathers is None:
            return None
        event = _end_of(self._gathers)
        torch.cuda.current_stream(self._device).wait_event(event)
        return event

    def gather_all(self, block_ids: Sequence[int], ranges: Sequence[TokenRange]) -> Iterator[Bytes]:
        """`gather` of each; on a GPU many whole blocks at once."""
        at = 0
        while at < len(ranges):
            blocks = self._whole_blocks(block_ids, ranges[at : at + _GATHERED_AT_ONCE])
            if len(blocks) > 1:
                yield from self._select(blocks)
                at += len(blocks)
            else:
                yield self.gather(block_ids, ranges[at])
                at += 1

    def gather(self, block_ids: Sequence[int], tokens: TokenRange) -> Bytes:
        """The object of `tokens`, on the cache's device. Their KV must be there. A GPU copies it on
        a stream of its own: behind the step in flight it would wait for all of that.

        Args:
            block_ids: the request's blocks from position 0 on.
        """
        shape = (*self._shape[:3], tokens.end - tokens.start, self._shape[4])
        runs = block_runs(tokens, tokens.start, self._block_size)
        if self._gathers is None:
            page: Any = np.empty(shape, np.uint8)
            self._read(page, block_ids, runs)
            return page  # type: ignore[no-any-return]
        with torch.cuda.stream(self._gathers):
            on_device = torch.empty(shape, dtype=torch.uint8, device=self._device)
            if self._is_block(runs, on_device.numel()):
                on_device.copy_(self._cache[block_ids[runs[0].block_index]])
            else:
                self._read(on_device, block_ids, runs)
        return on_device

    def _whole_blocks(self, block_ids: Sequence[int], ranges: Sequence[TokenRange]) -> list[int]:
        """The blocks of the first ranges, as far as each is one whole block; on a CPU none."""
        blocks: list[int] = []
        if self._gathers is not None:
            for start, end in ranges:
                if start % self._block_size or end - start != self._block_size:
                    break
                blocks.append(block_ids[start // self._block_size])
        return blocks

    def _select(self, blocks: Sequence[int]) -> Iterator[Bytes]:
        """Objects of these blocks, in one piece of memory."""
        with torch.cuda.stream(self._gathers):
            rows = torch.tensor(blocks, pin_memory=True).to(self._device, non_blocking=True)
            words = self._words.index_select(0, rows)
        shape = (len(blocks), *self._shape[:3], self._block_size, self._shape[4])
        return iter(words.view(torch.uint8).view(shape).unbind(0))

    def reach(self, pools: Sequence[memoryview]) -> None:
        """These whole pools are mapped here now, and no copy of another is under way: a GPU is to
        copy to and from them directly."""
        if self._pools is not None:
            self._pools.keep_only(pools)

    def fetch(
        self, page: Bytes, mark: torch.cuda.Event | None, view: memoryview
    ) -> Begun | Callable[[], None]:
        """Write a gathered object's bytes into `view`; returns what is left of that (`Move.touch`).
        Once it has ended, the object's memory may be given back without a word to the allocator.
        Any thread may call."""
        target = np.frombuffer(view, np.uint8)
        if not isinstance(page, torch.Tensor):
            return partial(np.copyto, target, page.reshape(-1))
        host = self._pools.tensor(view) if self._pools is not None else None
        if host is None:
            return partial(self._fetch_staged, page, mark, target)
        return Begun(self._copy_out(page, mark, host).synchronize)

    def scatter(
        self,
        view: memoryview,
        object_start: int,
        block_ids: Sequence[int],
        wanted: TokenRange,
    ) -> Begun | Callable[[], None]:
        """Write the tokens `wanted` of an object to their slots, which no step in flight touches;
        returns what is left of that (`Move.touch`). Any thread.

        Args:
            view: `[num_bytes]`, the object from position `object_start` on, in host memory.
        """
        source = np.frombuffer(view, np.uint8)
        runs = block_runs(wanted, object_start, self._block_size)
        if not self._on_gpu:
            return partial(self._write, source.reshape(self._shape), block_ids, runs)
        host = self._pools.tensor(view) if self._pools is not None else None
        if host is None:
            return partial(self._scatter_staged, source, block_ids, runs)
        return Begun(self._copy_in(host, block_ids, runs).synchronize)

    def _copy_out(
        self, page: Tensor, mark: torch.cuda.Event | None, host: Tensor
    ) -> torch.cuda.Event:
        stream = self._stream()
        with torch.cuda.stream(stream):
            if mark is not None:
                stream.wait_event(mark)
            host.copy_(page.view(-1), non_blocking=True)
        return _end_of(stream)

    def _fetch_staged(
        self, page: Tensor, mark: torch.cuda.Event | None, target: NDArray[np.uint8]
    ) -> None:
        host = self._staging(target.nbytes)
        self._copy_out(page, mark, host).synchronize()
        np.copyto(target, host.numpy())

    def _copy_in(
        self, host: Tensor, block_ids: Sequence[int], runs: Sequence[BlockRun]
    ) -> torch.cuda.Event:
        stream = self._stream()
        with torch.cuda.stream(stream):
            if self._is_block(runs, host.numel()):
                self._cache[block_ids[runs[0].block_index]].view(-1).copy_(host, non_blocking=True)
            else:
                on_device = host.to(self._device, non_blocking=True).view(self._shape)
                self._write(on_device, block_ids, runs)
        return _end_of(stream)

    def _scatter_staged(
        self, source: NDArray[np.uint8], block_ids: Sequence[int], runs: Sequence[BlockRun]
    ) -> None:
        host = self._staging(source.nbytes)
        np.copyto(host.numpy(), source)
        self._copy_in(host, block_ids, runs).synchronize()

    def _is_block(self, runs: Sequence[BlockRun], num_bytes: int) -> bool:
        """Whether these runs are all of an object of so many bytes, and one whole block: the two
        hold the same bytes in the same order."""
        whole = len(runs) == 1 and runs[0].num_tokens == self._block_size
        return whole and num_bytes == self._block_size * self.token_bytes

    def _read(self, page: Any, block_ids: Sequence[int], runs: Sequence[BlockRun]) -> None:
        for run in runs:
            page[:, :, :, run.offset : run.offset + run.num_tokens] = self._cache[
                block_ids[run.block_index], :, :, :, run.slot : run.slot + run.num_tokens
            ]

    def _write(self, page: Any, block_ids: Sequence[int], runs: Sequence[BlockRun]) -> None:
        for run in runs:
            self._cache[
                block_ids[run.block_index], :, :, :, run.slot : run.slot + run.num_tokens
            ] = page[:, :, :, run.offset : run.offset + run.num_tokens]

    def _stream(self) -> torch.cuda.Stream:
        """This thread's own."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = _side_stream_of(self._device)
        return stream

    def _staging(self, num_bytes: int) -> Tensor:
        """Pinned bytes of this thread's own, until its next call."""
        buffer = getattr(self._local, "staging", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._local.staging = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=True
            )
        return buffer[:num_bytes]


def _side_stream_of(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _end_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Of what it has been given so far."""
    event: torch.cuda.Event = stream.record_event()
    return event
