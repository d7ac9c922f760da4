"""What rows of requests sample by, as tables on the device: kernels find a row's part by its index.

Sizes: N rows, V tokens, E edits of a row, W tokens of its bad words, H output tokens remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# columns of `floats`
TEMPERATURE, TOP_P, LOG_MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
NUM_FLOATS = 6
# columns of `ints`
SEED, TOP_K, FLAGS, NUM_EDITS = range(4)
NUM_INTS = 4
# bits of the flags
ALLOWED, EDITED, PENALISED, LIMITED, REMEMBERED = (1 << i for i in range(5))

MAX_EDITS = 1024
MAX_PREFIX_TOKENS = 1024
MAX_REMEMBERED = 128
FOREVER = 2**31 - 1
# logits with a limit are taken as at most this, and as masked below its negative
LARGEST = 1e38
# binary places of the weights that top-p adds up
WEIGHT_BITS = 38
# of an entry of `counts`: the token is in the prompt; the rest counts up to this
IN_PROMPT = -(2**15)
MAX_COUNT = 2**15 - 1


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """All contiguous.

    Attributes:
        floats: `[N, 6]` float32: temperature (0 is greedy), top_p, the logarithm of min_p,
            presence, frequency and repetition penalty.
        ints: `[N, 4]` int64: seed, top_k (0 for none), flags (what below applies to the row, and
            whether top_k, top_p or min_p do), number of edits.
        counts: `[N, V]` int16: how often each token is in the output; `IN_PROMPT` is added where
            it is in the prompt.
        allowed: `[N, ceil(V / 32)]` int32, a bit per token, the lowest first.
        edits: `[N, 4, E]` int32: what is added to a token's logit, by ascending token: the token,
            the bits of the float32, before which output token, and after which prefix:
            `start * 256 + length` into the row of `prefixes`.
        prefixes: `[N, W]` int32: bad words without their last tokens.
        recent: `[N, H]` int32: output token i of the row at `i % H`.
    """

    floats: Tensor
    ints: Tensor
    counts: Tensor
    allowed: Tensor
    edits: Tensor
    prefixes: Tensor
    recent: Tensor


def make_tables(num_rows: int, vocab_size: int, device: torch.device) -> SamplingTables:
    """Tables of greedy rows: `num_rows * (2.125 * vocab_size + 21 KiB)` bytes."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return SamplingTables(
        floats=zeros(NUM_FLOATS, dtype=torch.float32),
        ints=zeros(NUM_INTS, dtype=torch.int64),
        counts=zeros(vocab_size, dtype=torch.int16),
        allowed=zeros(-(-vocab_size // 32)),
        edits=zeros(4, MAX_EDITS),
        prefixes=zeros(MAX_PREFIX_TOKENS),
        recent=zeros(MAX_REMEMBERED),
    )
