"""Log probabilities of chosen tokens and of the most likely ones, packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.request import TokenLogprobs

# positions whose log probabilities exist at one time
LOGITS_CHUNK = 128


class TopLogprobs:
    """Of `n` positions, `LOGITS_CHUNK` at most: the chosen token first, then the most likely in
    order. They are on their way to the host, and waited for by who packs them.
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
        top = logprobs.topk(most, dim=-1)
        self._ids = _begin_read(torch.cat((chosen[:, None], top.indices), dim=1))
        self._logprobs = _begin_read(torch.cat((of_chosen, top.values), dim=1))
        # the argmax has rank 1, ties or not
        self._ranks = _begin_read((logprobs > of_chosen).sum(-1) + 1)
        self._read: torch.cuda.Event | None = None
        if logits.device.type == "cuda":
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()

    def pack(self, positions: Sequence[int], most: int) -> TokenLogprobs:
        """Those of `positions`, with `most` likeliest each."""
        if self._read is not None:
            self._read.synchronize()
        index, width = torch.tensor(positions), most + 1
        return TokenLogprobs(
            width=width,
            token_ids=self._ids[index, :width].flatten().tolist(),
            logprobs=self._logprobs[index, :width].flatten().tolist(),
            ranks=self._ranks[index].tolist(),
        )


def _begin_read(values: Tensor) -> Tensor:
    """A copy on the host that is there once the device has come so far."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
