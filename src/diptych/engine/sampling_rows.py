"""How each row of the batch samples: its parameters, written when its request enters.

The tables are on the device. A row is uploaded once; from then on sampling itself keeps count of
the row's tokens there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.logit_edits import LogitEdits, make_logit_edits
from diptych.engine.pinned import Uploads
from diptych.engine.step import NewRequest
from diptych.kernels import sampling_tables as tables
from diptych.sampling_params import SamplingParams

NO_LOGPROBS = -2
_NO_PENALTIES = (0.0, 0.0, 1.0)


class SamplingRows:
    """Sampling parameters of `max_num_seqs` rows.

    Attributes:
        tables: on the device, up to date after `flush`.
        logprobs, prompt_logprobs: `[max_num_seqs]`, how many are wanted; `NO_LOGPROBS` for none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        uploads: Uploads | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._uploads = uploads or Uploads(device)
        self.tables = tables.make_tables(max_num_seqs, vocab_size, device)
        self._floats = np.zeros((max_num_seqs, tables.NUM_FLOATS), np.float32)
        self._ints = np.zeros((max_num_seqs, tables.NUM_INTS), np.int64)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        # what is to be uploaded, by row
        self._changed: set[int] = set()
        self._allowed: dict[int, NDArray[np.int32]] = {}
        self._edits: dict[int, LogitEdits] = {}
        self._counts: dict[int, tuple[NDArray[np.int64], NDArray[np.int16]]] = {}
        self._recent: dict[int, NDArray[np.int32]] = {}

    def set(self, row: int, new: NewRequest) -> None:
        """Write the parameters of a request that enters at `row`."""
        params = new.sampling_params
        self._floats[row] = (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        for pending in (self._allowed, self._edits, self._counts, self._recent):
            pending.pop(row, None)
        # the seed travels with the request; its name stands in where a caller brings none
        seed = zlib.crc32(new.request_id.encode()) if params.seed is None else params.seed
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        flags, num_edits = self._constrain(row, new)
        if tuple(self._floats[row, tables.PRESENCE :].tolist()) != _NO_PENALTIES:
            flags |= tables.PENALISED
            self._counts[row] = _counts(new.token_ids, new.num_prompt_tokens)
        limited = top_k > 0 or self._floats[row, tables.TOP_P] < 1.0 or params.min_p > 0.0
        if limited and not params.is_greedy:
            flags |= tables.LIMITED
        self._ints[row] = (seed, top_k, flags, num_edits)
        self._changed.add(row)
        self.logprobs[row] = _width(params.logprobs, self._vocab_size)
        self.prompt_logprobs[row] = _width(params.prompt_logprobs, self._vocab_size)

    def have_limits(self, rows: NDArray[np.int64]) -> bool:
        """Whether any of these rows has a top_k, top_p or min_p."""
        return bool((self._ints[rows, tables.FLAGS] & tables.LIMITED).any())

    def flush(self) -> None:
        """Bring the tables up to date."""
        if not self._changed:
            return
        rows = np.array(sorted(self._changed), np.int64)
        index, floats, ints = self._uploads.put_all(rows, self._floats[rows], self._ints[rows])
        self.tables.floats.index_copy_(0, index, floats)
        self.tables.ints.index_copy_(0, index, ints)
        self._put(self.tables.allowed, self._allowed)
        self._put(self.tables.recent, self._recent)
        self._put(self.tables.edits, {row: e.edits for row, e in self._edits.items()})
        self._put(self.tables.prefixes, {row: e.prefixes for row, e in self._edits.items()})
        self._put_counts()
        for pending in (self._allowed, self._edits, self._counts, self._recent):
            pending.clear()
        self._changed.clear()

    def _put(self, table: Tensor, values: Mapping[int, NDArray[np.int32]]) -> None:
        if values:
            rows = np.array(list(values), np.int64)
            index, stacked = self._uploads.put_all(rows, np.stack(list(values.values())))
            table.index_copy_(0, index, stacked)

    def _put_counts(self) -> None:
        if self._counts:
            counts = self.tables.counts
            at = [row * self._vocab_size + tokens for row, (tokens, _) in self._counts.items()]
            rows, where, values = self._uploads.put_all(
                np.array(list(self._counts), np.int64),
                np.concatenate(at),
                np.concatenate([values for _, values in self._counts.values()]),
            )
            counts.index_fill_(0, rows, 0)
            counts.view(-1).index_copy_(0, where, values)

    def _constrain(self, row: int, new: NewRequest) -> tuple[int, int]:
        """Flags of allowed tokens and edits, and how many edits."""
        params, flags = new.sampling_params, 0
        if params.allowed_token_ids is not None:
            flags |= tables.ALLOWED
            self._allowed[row] = _bits(params, self._vocab_size)
        edits = make_logit_edits(params, new.eos_token_ids, self._vocab_size)
        if edits is None:
            return flags, 0
        self._edits[row] = edits
        if edits.remembers:
            flags |= tables.REMEMBERED
            self._recent[row] = _recent(new.token_ids[new.num_prompt_tokens :])
        return flags | tables.EDITED, edits.count


def _bits(params: SamplingParams, vocab_size: int) -> NDArray[np.int32]:
    """A bit for each allowed token, the lowest first."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    allowed[params.allowed_token_ids] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def _counts(
    token_ids: list[int], num_prompt_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """The tokens that occur, each once, and their entries of the table."""
    ids = np.array(token_ids, np.int64)
    tokens, of = np.unique(ids, return_inverse=True)
    counts = np.bincount(of[num_prompt_tokens:], minlength=len(tokens))
    entries = np.minimum(counts, tables.MAX_COUNT).astype(np.int16)
    entries[of[:num_prompt_tokens]] |= np.int16(tables.IN_PROMPT)
    return tokens, entries


def _recent(output: list[int]) -> NDArray[np.int32]:
    """The last output tokens, each at its place."""
    recent = np.zeros(tables.MAX_REMEMBERED, np.int32)
    places = np.arange(max(0, len(output) - len(recent)), len(output))
    recent[places % len(recent)] = np.array(output, np.int32)[places]
    return recent


def _width(count: int | None, vocab_size: int) -> int:
    if count is None:
        return NO_LOGPROBS
    return vocab_size if count == -1 else min(count, vocab_size)
