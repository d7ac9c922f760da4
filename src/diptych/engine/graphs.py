"""Steps captured as CUDA graphs, for a ladder of sizes and of context lengths.

A graph is launched for the next larger size, with padding that writes no KV and reads none, and for
the next longer context, which decides how far attention splits its keys and how wide its block
tables are. All graphs share one memory pool: only one runs at a time.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch

logger = logging.getLogger(__name__)

# a prompt of 8,192 tokens finds room for its answer
_CONTEXTS = (2048, 8704, 32768)
# tokens of steps that compute prompts, by rows that decode beside them: matrix products take no
# longer for the next multiple of 128
_MIXED_TOKENS = {0: (64, 128, 256, 512, 1024), 32: (128, 256, 512, 640), 256: (512, 768)}
# a step of fewer tokens is launched in longer than it takes; a larger one is worth little padding
_ALWAYS_PAYS = 640
_LEAST_FILLED = 0.9
# the driver's share of a graph of a few hundred kernels, and slack of the pool
_BYTES_PER_GRAPH = 3 << 20


class MixedSize(NamedTuple):
    """Sequences of one token, and tokens of all others; both padded."""

    singles: int
    tokens: int


# a size and a context length
MixedKey = tuple[MixedSize, int]


class Capture(Protocol):
    """Makes something that repeats what `run` does to the device; `run` may be called for it."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Sizes that graphs are captured for, ascending: padding costs at most 7 rows up to 64, then at
    most a quarter."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)]
    steps += [*range(256, 512, 64), *range(512, max(max_num_seqs, 512), 128)]
    return [size for size in steps if size < max_num_seqs] + [max_num_seqs]


def context_lengths(max_model_len: int) -> list[int]:
    """Context lengths that graphs are captured for, ascending."""
    return [length for length in _CONTEXTS if length < max_model_len] + [max_model_len]


def mixed_sizes(max_num_seqs: int, max_num_tokens: int) -> list[MixedSize]:
    """Sizes of steps that compute prompts and are captured: those that take a GPU less time than
    the host takes to launch them, or not much more."""
    sizes = []
    for most_singles, totals in _MIXED_TOKENS.items():
        singles = min(most_singles, max_num_seqs)
        sizes += [MixedSize(singles, total - singles) for total in totals]
    return [size for size in dict.fromkeys(sizes) if size.tokens <= max_num_tokens]


def fit(ladder: Sequence[int], wanted: int) -> int:
    """The least of an ascending ladder that holds `wanted`."""
    return ladder[bisect_left(ladder, wanted)]


def graph_bytes(num_graphs: int, step_bytes: int) -> int:
    """What the graphs take: the activations of the largest step, and their own."""
    return step_bytes + num_graphs * _BYTES_PER_GRAPH


class GraphPool:
    """`Capture` as CUDA graphs over one memory pool, on one stream.

    Capture larger steps first: smaller ones then live in what those left.

    Args:
        trial: what a step is run in before it is captured; it may leave out what is repeated.
    """

    def __init__(
        self,
        device: torch.device,
        trial: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._trial = trial
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        # only here: it needs Triton, which captured steps have
        from diptych.kernels.early_start import starting_early

        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), starting_early():
            with self._trial():
                run()  # compiles kernels and makes workspaces, which capture may not
            self._stream.synchronize()
            # transfer threads may go on calling CUDA
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay


class DecodeGraphs:
    """One graph per size and context length.

    Args:
        step: `step(size, context)` runs a decode step of so many rows on the device, over static
            tensors, whatever they hold.
        sizes, contexts: the ladders, ascending.
        capture: how a step becomes repeatable.
    """

    def __init__(
        self,
        step: Callable[[int, int], None],
        sizes: Sequence[int],
        contexts: Sequence[int],
        capture: Capture,
    ) -> None:
        started = time.monotonic()
        self._sizes, self._contexts = sizes, contexts
        self._replays = {
            (size, context): capture(partial(step, size, context))
            for size in reversed(sizes)
            for context in reversed(contexts)
        }
        logger.info(
            "captured %d decode graphs in %.1f s", len(self._replays), time.monotonic() - started
        )

    def replay(self, num_rows: int, longest: int) -> None:
        """Run the step of `num_rows` sequences, the longest of `longest` tokens."""
        self._replays[fit(self._sizes, num_rows), fit(self._contexts, longest)]()


class MixedGraphs:
    """One graph per size and context length of steps that compute prompts.

    Args:
        step: as of `DecodeGraphs`, by size.
        sizes, contexts: all that there are.
        most_prompts: sequences of more than one token that a graph has room for.
        capture: how a step becomes repeatable.
    """

    def __init__(
        self,
        step: Callable[[MixedSize, int], None],
        sizes: Sequence[MixedSize],
        contexts: Sequence[int],
        most_prompts: int,
        capture: Capture,
    ) -> None:
        started = time.monotonic()
        self._most_prompts = most_prompts
        self._replays = {
            (size, context): capture(partial(step, size, context))
            for size in sorted(sizes, key=sum, reverse=True)
            for context in reversed(contexts)
        }
        # the smallest that holds a step is the first that does
        self._ladder = sorted(self._replays, key=lambda key: (sum(key[0]), *key))
        logger.info(
            "captured %d graphs of prompts in %.1f s",
            len(self._replays),
            time.monotonic() - started,
        )

    def find(
        self, num_singles: int, num_tokens: int, num_prompts: int, longest: int
    ) -> MixedKey | None:
        """The graph for a step of so many sequences of one token, tokens of all others, and others;
        None if there is none, or padding would cost more than launching saves."""
        if num_prompts > self._most_prompts:
            return None
        for size, context in self._ladder:
            if num_singles <= size.singles and num_tokens <= size.tokens and longest <= context:
                tokens = num_singles + num_tokens
                pays = sum(size) <= _ALWAYS_PAYS or tokens >= _LEAST_FILLED * sum(size)
                return (size, context) if pays else None
        return None

    def replay(self, key: MixedKey) -> None:
        self._replays[key]()
