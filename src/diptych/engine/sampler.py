"""From logits to tokens.

Order: constraints (allowed ids, banned ids, bias), penalties, temperature, min_p, top_k and top_p,
Gumbel-max. Each row depends on its own logits, parameters, seed and position alone, never on the
batch: what a neighbour asks for changes nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.kernels.noise import gumbel_noise

# rows with a top_k up to this take a partial sort
_PARTIAL_SORT = 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """What one request may not, or would rather, sample.

    Attributes:
        allowed: `[V]` bool; None for all.
        bias_ids, bias: `[B]`, added to these logits.
        bad_words: token sequences that must not be completed.
        min_tokens: output tokens before which none of `stop_ids` is sampled.
    """

    allowed: Tensor | None
    bias_ids: Tensor
    bias: Tensor
    bad_words: Sequence[Sequence[int]]
    min_tokens: int
    stop_ids: Sequence[int]

    def banned(self, output: list[int]) -> list[int]:
        """The ids that may not follow `output`."""
        ids = list(self.stop_ids) if len(output) < self.min_tokens else []
        for word in self.bad_words:
            *prefix, last = word
            if not prefix or output[-len(prefix) :] == prefix:
                ids.append(last)
        return ids


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P rows.

    Attributes:
        members: `[P]`, the rows of the logits.
        prompt, output: `[N]` their tokens, as indices into the flattened `[P, V]`.
        presence, frequency, repetition: `[P, 1]`.
    """

    members: Tensor
    prompt: Tensor
    output: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """How the R rows of a step sample at random.

    Attributes:
        temperature: `[R]`; 0 for a greedy row.
        all_random: no row is greedy.
        min_p: `[R]`; None where no row has one.
        top_p: `[R]`; top_k: `[R]` int64, 0 for none.
        limited_by_topk, limited_by_topp: the rows with a top_k, and those with only a top_p.
        max_top_k: over the rows.
        seeds, positions: `[R]` int64, what the noise is keyed by.
    """

    temperature: Tensor
    all_random: bool
    min_p: Tensor | None
    top_k: Tensor
    top_p: Tensor
    limited_by_topk: list[int]
    limited_by_topp: list[int]
    max_top_k: int
    seeds: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the rows of a step sample: greedily where `random` is None.

    `constraints` lists (row, constraint, ids banned now).
    """

    constraints: list[tuple[int, Constraint, list[int]]] = field(default_factory=list)
    penalties: Penalties | None = None
    random: RandomRows | None = None


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The token of each row, `[R]` int64.

    Args:
        logits: `[R, V]` float32; overwritten.
    """
    for row, constraint, banned in batch.constraints:
        _constrain(logits[row], constraint, banned)
    if batch.penalties is not None:
        _penalise(logits, batch.penalties)
    rows = batch.random
    if rows is None:
        return logits.argmax(-1)
    if rows.all_random:
        return _sample_random(logits, rows)
    greedy = logits.argmax(-1)
    return torch.where(rows.temperature == 0.0, greedy, _sample_random(logits, rows))


def _sample_random(logits: Tensor, rows: RandomRows) -> Tensor:
    logits.div_(torch.where(rows.temperature == 0.0, 1.0, rows.temperature)[:, None])
    if rows.min_p is not None:
        # p < min_p * p_max, in logits: exact, and nothing for min_p 0
        least = logits.amax(-1, keepdim=True) + rows.min_p.log()[:, None]
        logits.masked_fill_(logits < least, -torch.inf)
    if rows.limited_by_topk or rows.limited_by_topp:
        _limit(logits, rows)
    return logits.add_(gumbel_noise(rows.seeds, rows.positions, logits.shape[1])).argmax(-1)


def _constrain(logits: Tensor, constraint: Constraint, banned: list[int]) -> None:
    """`logits` is one row, `[V]`."""
    if constraint.allowed is not None:
        logits.masked_fill_(~constraint.allowed, -torch.inf)
    if banned:
        logits.index_fill_(0, _index(banned, logits.device), -torch.inf)
    if len(constraint.bias_ids):
        logits.index_add_(0, constraint.bias_ids, constraint.bias)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    """Repetition counts prompt and output, presence and frequency the output alone."""
    # [P, V]
    rows = logits[penalties.members]
    counts = torch.zeros_like(rows)
    ones = torch.ones_like(penalties.output, dtype=rows.dtype)
    counts.view(-1).scatter_add_(0, penalties.output, ones)
    seen = counts > 0
    seen_anywhere = seen.clone()
    seen_anywhere.view(-1)[penalties.prompt] = True
    repeated = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
    rows = torch.where(seen_anywhere, repeated, rows)
    rows -= penalties.frequency * counts
    rows -= penalties.presence * seen
    logits[penalties.members] = rows


def _limit(logits: Tensor, rows: RandomRows) -> None:
    """Remove what lies under each limited row's top_k and top_p, in place."""
    vocab = logits.shape[1]
    depth = min(rows.max_top_k, vocab)
    by_topk, by_sort = rows.limited_by_topk, []
    if depth > _PARTIAL_SORT:
        deep = (rows.top_k[by_topk] > _PARTIAL_SORT).tolist()
        by_sort = [row for row, is_deep in zip(by_topk, deep, strict=True) if is_deep]
        by_topk = [row for row, is_deep in zip(by_topk, deep, strict=True) if not is_deep]
        depth = _PARTIAL_SORT
    for members, count in ((by_topk, depth), (by_sort, vocab)):
        if members:
            index = _index(members, logits.device)
            values = logits[index].topk(count).values
            least = _least_kept(values, rows.top_k[index, None], rows.top_p[index, None])
            _remove_below(logits, index, least)
    if rows.limited_by_topp:
        index = _index(rows.limited_by_topp, logits.device)
        _remove_below(logits, index, _least_by_topp(logits[index], rows.top_p[index, None]))


def _index(members: list[int], device: torch.device) -> Tensor:
    """On a GPU a copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.tensor(members)
    return torch.tensor(members, pin_memory=True).to(device, non_blocking=True)


def _remove_below(logits: Tensor, index: Tensor, least: Tensor) -> None:
    rows = logits[index]
    logits[index] = rows.masked_fill_(rows < least, -torch.inf)


def _least_kept(values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`[P, 1]`: the smallest logit that top_k, then top_p, keep.

    values `[P, d]` is descending; top_k `[P, 1]` is at most d; top_p `[P, 1]`.
    """
    at = torch.arange(values.shape[1], device=values.device)
    # double: the sum must not depend on how many zeros stand behind the k
    weights = (values - values[:, :1]).double().exp().masked_fill_(at >= top_k, 0.0)
    sums = weights.cumsum(-1)
    kept = (at < top_k) & ((sums - weights < top_p * sums[:, -1:]) | (top_p >= 1.0))
    return values.gather(1, kept.sum(-1, keepdim=True).clamp_(min=1) - 1)


def _least_by_topp(logits: Tensor, top_p: Tensor) -> Tensor:
    """`[P, 1]`: the smallest logit that top_p keeps of each row of `[P, V]`.

    A CPU takes 3 ms to sort 49,152 logits, so it looks for p among the most likely ones first.
    """
    if logits.device.type != "cpu" or logits.shape[1] <= _PARTIAL_SORT:
        return _least_in(logits.sort(descending=True).values, logits, top_p)[0]
    least, found = _least_in(logits.topk(_PARTIAL_SORT).values, logits, top_p)
    if not bool(found.all()):
        rest = (~found).nonzero()[:, 0]
        flat = logits[rest]
        least[rest] = _least_in(flat.sort(descending=True).values, flat, top_p[rest])[0]
    return least


def _least_in(values: Tensor, logits: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest logit kept, `[P, 1]`, and whether the largest, `values`, reach p, `[P]`."""
    most = values[:, :1]
    wanted = top_p * (logits - most).double().exp().sum(-1, keepdim=True)
    weights = (values - most).double().exp()
    sums = weights.cumsum(-1)
    kept = (sums - weights < wanted).sum(-1, keepdim=True).clamp_(min=1)
    return values.gather(1, kept - 1), sums[:, -1] >= wanted[:, 0]
