"""The state of the requests in a batch, one row each, and the step that it makes.

A request is written whole when it enters; afterwards only what changed is written. All of a step is
worked out over rows at once, with no loop over requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.pinned import Uploads
from diptych.engine.resident_rows import DecodeRows
from diptych.engine.sampling_rows import NO_LOGPROBS, SamplingRows
from diptych.engine.step import NewRequest, RunningRequest, SchedulerOutput
from diptych.models.layers import ForwardBatch, LastTokens, ManyQueries, SingleQueries

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which rows a step computes, those of one token first; S sequences.

    Attributes:
        request_ids: the requests of the rows.
        rows: `[S]`, their rows.
        num_singles: how many compute one token.
        starts: `[S + 1]`, where the tokens of each start in the flattened batch.
        first, end: `[S]`, each computes its tokens `first..end`.
        samples: `[R]`, indices into the S of those that reach their last token.
    """

    request_ids: list[str]
    rows: Int64Array
    num_singles: int
    starts: Int64Array
    first: Int64Array
    end: Int64Array
    samples: Int64Array


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The T tokens of a step, in its order.

    Attributes:
        rows, input_ids, positions, slots: `[T]`, row, id (-1 for one that the device sampled last
            for the row), place in the sequence, place in the cache.
    """

    rows: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    slots: Int64Array


@dataclass(frozen=True, slots=True)
class Appended:
    """Where the sampled tokens of a step belong, once they are known.

    Attributes:
        request_ids: whose they are.
        rows, positions: `[R]`, where.
        entries: `[R]`, which entry into its row each belongs to: the row may have another by then.
    """

    request_ids: list[str]
    rows: Int64Array
    positions: Int64Array
    entries: Int64Array


class InputBatch:
    """Rows of requests.

    Args:
        max_num_seqs, max_model_len: rows, and tokens of a row.
        block_size: tokens of a KV block.
        vocab_size: of the model's logits.
        device: where steps run.

    Attributes:
        block_tables: `[max_num_seqs, blocks]` int32 on the device, up to date once a step's inputs
            are made; entries past a row's blocks mean nothing.
        last_tokens: `[max_num_seqs]` int64 on the device, the token last sampled for each row.
        uploads: how arrays get to the device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._on_host = device.type == "cpu"
        self.uploads = Uploads(device)
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._row_of: dict[str, int] = {}
        blocks = -(-max_model_len // block_size) + 1
        # zeros come from the system untouched: unused rows cost no memory
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        # those of them that are in `token_ids`: the last ones may be on the device alone
        self._num_known: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._entries: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.num_prompt_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._block_tables: Int32Array = np.zeros((max_num_seqs, blocks), np.int32)
        # on a CPU the host's array
        self.block_tables = torch.from_numpy(self._block_tables).to(device)
        # (row, first, end) of the entries that the device does not have yet
        self._changed: list[tuple[int, int, int]] = []
        self._num_blocks: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.sampling = SamplingRows(max_num_seqs, vocab_size, device, self.uploads)

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, step: SchedulerOutput) -> None:
        """Bring the rows to the state at the start of `step`."""
        self.uploads.begin_step()
        for request_id in step.finished_request_ids:
            self._remove(request_id)
        for new in step.new_requests:
            self._add(new)
        for running in step.running_requests:
            self._update(running)

    def step_rows(self, num_scheduled_tokens: dict[str, int]) -> StepRows:
        """The rows of the scheduled requests; otherwise in the scheduler's order."""
        request_ids = list(num_scheduled_tokens)
        counts = np.fromiter(num_scheduled_tokens.values(), np.int64, len(request_ids))
        singles = counts == 1
        num_singles = int(singles.sum())
        if not singles[:num_singles].all():
            order = np.argsort(~singles, kind="stable")
            counts, request_ids = counts[order], [request_ids[i] for i in order.tolist()]
        rows = np.array([self._row_of[r] for r in request_ids], np.int64)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        first = self.num_computed_tokens[rows]
        end = first + counts
        samples = np.flatnonzero(end == self.num_tokens[rows])
        return StepRows(request_ids, rows, num_singles, starts, first, end, samples)

    def tokens(self, step: StepRows) -> StepTokens:
        """The step's tokens; the block tables on the device are up to date."""
        self._flush()
        counts = step.end - step.first
        rows = np.repeat(step.rows, counts)
        positions = np.arange(len(rows)) + np.repeat(step.first - step.starts[:-1], counts)
        ids, slots = self._known_ids(rows, positions), self._slots(rows, positions)
        return StepTokens(rows, ids, positions, slots)

    def forward_batch(self, step: StepRows, *, whole: bool = False) -> ForwardBatch:
        """The step's tensors on the device; the outcome is of `step.samples`, or `whole`."""
        tokens = self.tokens(step)
        known = tokens.input_ids
        input_ids, at, slots = self.uploads.put_all(known, tokens.positions, tokens.slots)
        if len(missing := np.flatnonzero(known < 0)):
            where, which = self.uploads.put_all(missing, tokens.rows[missing])
            input_ids.index_copy_(0, where, self.last_tokens.index_select(0, which))
        singles = many = None
        if step.num_singles:
            singles = self._queries(step.rows[: step.num_singles], step.end[: step.num_singles])
        if step.num_singles < len(step.rows):
            many = self._many(step)
        last = None if whole or len(step.samples) == len(known) else self._last(step)
        return ForwardBatch(input_ids, at, slots, singles, many, last)

    def _queries(self, rows: Int64Array, ends: Int64Array) -> SingleQueries:
        """One query of each row, before token `ends`."""
        lengths, there = self.uploads.put_all(ends.astype(np.int32), rows)
        longest = int(ends.max(initial=1))
        return SingleQueries(self._tables(there, longest), lengths, longest)

    def _last(self, step: StepRows) -> LastTokens:
        samples = step.samples
        (index,) = self.uploads.put_all(step.starts[samples + 1] - 1)
        return LastTokens(index, self._queries(step.rows[samples], step.end[samples]))

    def _many(self, step: StepRows) -> ManyQueries:
        """Of the step's sequences those that compute more than one token."""
        count = step.num_singles
        starts, ends = step.starts[count:] - step.starts[count], step.end[count:]
        put = (starts.astype(np.int32), ends.astype(np.int32), step.rows[count:])
        starts_there, lengths, rows = self.uploads.put_all(*put)
        tables = self._tables(rows, int(ends.max()))
        return ManyQueries(tables, starts_there, lengths, int(np.diff(starts).max()))

    def _tables(self, rows: Tensor, longest: int) -> Tensor:
        width = -(-longest // self._block_size)
        return self.block_tables[:, :width].index_select(0, rows)

    def wants_prompt_logprobs(self, step: StepRows) -> bool:
        return bool((self.sampling.prompt_logprobs[step.rows] != NO_LOGPROBS).any())

    def knows_prompts(self, step: StepRows) -> bool:
        """Whether the host knows all tokens of the sequences that compute more than one."""
        many = slice(step.num_singles, None)
        return bool((step.end[many] <= self._num_known[step.rows[many]]).all())

    def decodes(self, step: StepRows) -> bool:
        """Whether each row computes its last token alone, to sample the next."""
        return len(step.samples) == len(step.rows) == step.num_singles

    def decode_rows(self, step: StepRows) -> DecodeRows:
        """A step that `decodes`; block tables and sampling on the device are up to date."""
        self._flush()
        self.sampling.flush()
        rows, positions = step.rows, step.first
        return DecodeRows(
            rows=rows,
            entries=self._entries[rows],
            input_ids=self._known_ids(rows, positions),
            positions=positions,
            prompt_lens=self.num_prompt_tokens[rows],
        )

    def append(self, step: StepRows) -> Appended:
        """A token is sampled for each of `step.samples`: behind their rows' last."""
        rows = step.rows[step.samples]
        positions = self.num_tokens[rows]
        self.num_tokens[rows] += 1
        names = [step.request_ids[i] for i in step.samples.tolist()]
        return Appended(names, rows, positions, self._entries[rows])

    def fill(self, appended: Appended, token_ids: Int64Array) -> None:
        """The appended tokens are known: write them on the host."""
        still = self._entries[appended.rows] == appended.entries
        rows, positions = appended.rows[still], appended.positions[still]
        self.token_ids[rows, positions] = token_ids[still]
        self._num_known[rows] = positions + 1

    def num_outputs(self, rows: Int64Array) -> Int64Array:
        """Output tokens of these rows so far."""
        counts: Int64Array = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        return counts

    def _known_ids(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """The tokens there; -1 for one that the device alone knows."""
        known = positions < self._num_known[rows]
        return np.where(known, self.token_ids[rows, positions], -1).astype(np.int64)

    def _slots(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        blocks = self._block_tables[rows, positions // self._block_size].astype(np.int64)
        slots: Int64Array = blocks * self._block_size + positions % self._block_size
        return slots

    def _flush(self) -> None:
        """Bring the block tables on the device up to date."""
        if self._changed and not self._on_host:
            width = self._block_tables.shape[1]
            index = np.concatenate(
                [np.arange(row * width + at, row * width + end) for row, at, end in self._changed]
            )
            where, blocks = self.uploads.put_all(index, self._block_tables.reshape(-1)[index])
            self.block_tables.view(-1).index_copy_(0, where, blocks)
        self._changed.clear()

    def _add(self, new: NewRequest) -> None:
        self._remove(new.request_id)
        row = self._row_of[new.request_id] = self._free_rows.pop()
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = self._num_known[row] = count
        self._entries[row] += 1
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids[0])
        self.sampling.set(row, new)

    def _update(self, running: RunningRequest) -> None:
        row = self._row_of[running.request_id]
        self.num_computed_tokens[row] = running.num_computed_tokens
        if running.new_block_ids[0]:
            self._append_blocks(row, running.new_block_ids[0])

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = int(self._num_blocks[row])
        end = start + len(block_ids)
        self._block_tables[row, start:end] = block_ids
        self._num_blocks[row] = end
        self._changed.append((row, start, end))

    def _remove(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
