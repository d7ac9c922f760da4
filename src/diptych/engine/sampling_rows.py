"""How each row of the batch samples: its parameters, written when its request enters.

The figures stand on the host, where they say what a step needs, and in row tensors on the device.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.pinned import Uploads
from diptych.engine.sampler import Constraint, Penalties, RandomRows, SamplingBatch
from diptych.engine.step import NewRequest

NO_LOGPROBS = -2
_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = range(6)
_NEUTRAL = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
_SEED, _TOP_K = range(2)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The known tokens of some rows, as `InputBatch` keeps them on the host.

    Attributes:
        rows: `[R]`.
        token_ids: `[max_num_seqs, max_len]`, all rows.
        num_prompt_tokens, num_tokens: `[R]`.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    num_prompt_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    def output(self, index: int) -> list[int]:
        row, start, end = self.rows[index], self.num_prompt_tokens[index], self.num_tokens[index]
        tokens: list[int] = self.token_ids[row, start:end].tolist()
        return tokens


class SamplingRows:
    """Sampling parameters of `max_num_seqs` rows."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        uploads: Uploads | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._uploads = uploads or Uploads(device)
        self._floats = np.tile(np.array(_NEUTRAL, np.float32), (max_num_seqs, 1))
        self._ints = np.zeros((max_num_seqs, 2), np.int64)
        # on a CPU the row tensors are the host's arrays
        self._float_rows = torch.from_numpy(self._floats).to(device)
        self._int_rows = torch.from_numpy(self._ints).to(device)
        self._changed: set[int] = set()
        # greedy, or a temperature and nothing else
        self.is_plain = np.zeros(max_num_seqs, np.bool_)
        self.logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self._constraints: dict[int, Constraint] = {}

    def set(self, row: int, new: NewRequest) -> None:
        """Write the parameters of a request that enters at `row`."""
        params = new.sampling_params
        self._floats[row] = (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        # the seed travels with the request; its name stands in where a caller brings none
        seed = zlib.crc32(new.request_id.encode()) if params.seed is None else params.seed
        self._ints[row] = (seed, params.top_k if params.top_k < self._vocab_size else 0)
        self._changed.add(row)
        self.logprobs[row] = _width(params.logprobs, self._vocab_size)
        self.prompt_logprobs[row] = _width(params.prompt_logprobs, self._vocab_size)
        constraint = self._make_constraint(new)
        if constraint is not None:
            self._constraints[row] = constraint
        self.is_plain[row] = constraint is None and self._samples_plainly(row)

    def clear(self, row: int) -> None:
        """The request of `row` left."""
        self._constraints.pop(row, None)

    @property
    def temperatures(self) -> Tensor:
        """`[max_num_seqs]` on the device; 0 for a greedy row."""
        return self._float_rows[:, _TEMPERATURE]

    @property
    def seeds(self) -> Tensor:
        """`[max_num_seqs]` int64 on the device."""
        return self._int_rows[:, _SEED]

    def flush(self) -> None:
        """Bring the rows on the device up to date."""
        if self._changed and self._device.type != "cpu":
            rows = np.array(sorted(self._changed), np.int64)
            index, floats, ints = self._uploads.put_all(rows, self._floats[rows], self._ints[rows])
            self._float_rows.index_copy_(0, index, floats)
            self._int_rows.index_copy_(0, index, ints)
        self._changed.clear()

    def batch(self, tokens: RowTokens) -> SamplingBatch:
        """What the sampler needs for these rows, and no more."""
        self.flush()
        floats = self._floats[tokens.rows]
        return SamplingBatch(
            constraints=self._step_constraints(tokens) if self._constraints else [],
            penalties=self._penalties(tokens, floats),
            random=self._random_rows(tokens, floats),
        )

    def _random_rows(self, tokens: RowTokens, floats: NDArray[np.float32]) -> RandomRows | None:
        random = floats[:, _TEMPERATURE] > 0.0
        if not random.any():
            return None
        top_k, top_p = self._ints[tokens.rows, _TOP_K], floats[:, _TOP_P]
        on_device, positions = self._uploads.put_all(
            tokens.rows, tokens.num_tokens - tokens.num_prompt_tokens
        )
        f, i = self._float_rows[on_device], self._int_rows[on_device]
        return RandomRows(
            temperature=f[:, _TEMPERATURE],
            all_random=bool(random.all()),
            min_p=f[:, _MIN_P] if (floats[:, _MIN_P] > 0.0).any() else None,
            top_k=i[:, _TOP_K],
            top_p=f[:, _TOP_P],
            limited_by_topk=np.flatnonzero(top_k > 0).tolist(),
            limited_by_topp=np.flatnonzero((top_k == 0) & (top_p < 1.0)).tolist(),
            max_top_k=int(top_k.max()),
            seeds=i[:, _SEED],
            positions=positions,
        )

    def _samples_plainly(self, row: int) -> bool:
        floats = self._floats[row]
        if tuple(floats[_PRESENCE:]) != _NEUTRAL[_PRESENCE:]:
            return False
        limited = floats[_TOP_P] < 1.0 or floats[_MIN_P] > 0.0 or self._ints[row, _TOP_K] > 0
        return bool(floats[_TEMPERATURE] == 0.0 or not limited)

    def _make_constraint(self, new: NewRequest) -> Constraint | None:
        params = new.sampling_params
        allowed, bias = None, params.logit_bias or {}
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            allowed[torch.tensor(params.allowed_token_ids, device=self._device)] = True
        stop_ids = sorted({*(params.stop_token_ids or []), *new.eos_token_ids})
        bad_words = params.bad_words_token_ids or []
        if allowed is None and not bias and not bad_words and not (params.min_tokens and stop_ids):
            return None
        return Constraint(
            allowed=allowed,
            bias_ids=torch.tensor(list(bias), dtype=torch.int64, device=self._device),
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
            bad_words=bad_words,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
        )

    def _step_constraints(self, tokens: RowTokens) -> list[tuple[int, Constraint, list[int]]]:
        """(index in the step, constraint, ids that may not be sampled now)."""
        found = []
        for index, row in enumerate(tokens.rows.tolist()):
            constraint = self._constraints.get(row)
            if constraint is not None:
                found.append((index, constraint, constraint.banned(tokens.output(index))))
        return found

    def _penalties(self, tokens: RowTokens, floats: NDArray[np.float32]) -> Penalties | None:
        neutral = np.array(_NEUTRAL[_PRESENCE:], np.float32)
        members = np.flatnonzero((floats[:, _PRESENCE:] != neutral).any(1))
        if not len(members):
            return None
        longest = int(tokens.num_tokens[members].max())
        known = tokens.token_ids[tokens.rows[members], :longest]
        at = np.arange(known.shape[1])
        prompt = at < tokens.num_prompt_tokens[members, None]
        output = ~prompt & (at < tokens.num_tokens[members, None])
        known = known + np.arange(len(members))[:, None] * self._vocab_size
        on_device, prompt_ids, output_ids, values = self._uploads.put_all(
            members, known[prompt], known[output], floats[members, _PRESENCE:]
        )
        return Penalties(
            members=on_device,
            prompt=prompt_ids,
            output=output_ids,
            presence=values[:, 0:1],
            frequency=values[:, 1:2],
            repetition=values[:, 2:3],
        )


def _width(count: int | None, vocab_size: int) -> int:
    if count is None:
        return NO_LOGPROBS
    return vocab_size if count == -1 else min(count, vocab_size)
