"""Log probabilities of chosen tokens and of the most likely ones, packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.request import TokenLogprobs

# positions whose log probabilities exist at one time
LOGITS_CHUNK = 128


class TopLogprobs:
    """Of `n` positions, on the host: the chosen token first, then the most likely in order.

    `n` is at most `LOGITS_CHUNK`.
    """

    def __init__(self, logits: Tensor, chosen: Tensor, most: int) -> None:
        """
        Args:
            logits: `[n, V]`, as the model gave them.
            chosen: `[n]` int64.
            most: likeliest tokens per position.
        """
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        of_chosen = logprobs.gather(1, chosen[:, None])
        # the argmax has rank 1, ties or not
        ranks = (logprobs > of_chosen).sum(-1) + 1
        top = logprobs.topk(most, dim=-1)
        self._ids = torch.cat((chosen[:, None], top.indices), dim=1).tolist()
        self._logprobs = torch.cat((of_chosen, top.values), dim=1).tolist()
        self._ranks: list[int] = ranks.tolist()

    def pack(self, positions: Sequence[int], most: int) -> TokenLogprobs:
        """Those of `positions`, with `most` likeliest each."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        ranks: list[int] = []
        for position in positions:
            token_ids += self._ids[position][: most + 1]
            logprobs += self._logprobs[position][: most + 1]
            ranks.append(self._ranks[position])
        return TokenLogprobs(width=most + 1, token_ids=token_ids, logprobs=logprobs, ranks=ranks)
