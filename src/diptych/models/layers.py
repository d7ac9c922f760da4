"""The parts that decoders are made of. They know tensors and ops, not requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.errors import ModelLoadError
from diptych.kernels.dispatch import Ops
from diptych.kernels.fp8_tensor import Rows
from diptych.models.config import ModelConfig
from diptych.models.fp8 import load_fp8, make_fp8_matrix
from diptych.models.loader import Weights
from diptych.models.matrix import Matrix, make_matrix


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """S sequences of one token each.

    Attributes:
        block_tables: `[S, max_blocks]` int32.
        seq_lens: `[S]` int32, the token included.
        max_seq_len: over them, or more.
    """

    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ManyQueries:
    """S sequences of any number of tokens.

    Attributes:
        block_tables: `[S, max_blocks]` int32.
        query_start_loc: `[S + 1]` int32, from 0 on.
        seq_lens: `[S]` int32, the tokens included.
        max_query_len: over them, or more.
    """

    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The R tokens that a step is about, each the last of its sequence: those it samples after.

    Attributes:
        index: `[R]` int64, which of the step's tokens they are.
        queries: their sequences.
    """

    index: Tensor
    queries: SingleQueries


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, sequence by sequence: first `singles`, then `many`.

    Attributes:
        input_ids, positions, slot_mapping: `[T]` int64.
        singles, many: whose they are; None for none.
        last: of which tokens the outcome is wanted; None for all of them. Of the others the last
            layer computes keys and values alone.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    singles: SingleQueries | None = None
    many: ManyQueries | None = None
    last: LastTokens | None = None


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's keys and values, `[num_blocks, H_kv, block_size, D]` each, strided."""

    k: Tensor
    v: Tensor


def layer_views(kv_cache: Tensor) -> list[KVView]:
    """The layers of a cache `[num_blocks, H_kv, layers, 2, block_size, D]`."""
    return [
        KVView(kv_cache[:, :, layer, 0], kv_cache[:, :, layer, 1])
        for layer in range(kv_cache.shape[2])
    ]


def load_matrix(
    ops: Ops, weights: Weights, names: Sequence[str], rows: Sequence[int], columns: int
) -> Matrix:
    """One matrix, or several with the same input, fused."""
    biases = [f"{name}.bias" for name in names]
    bias = weights.load(biases, rows) if biases[0] in weights else None
    if weights.fp8 is not None and weights.fp8.covers(names):
        return make_fp8_matrix(
            ops, load_fp8(weights.fp8, weights, names, rows, columns), bias, weights.dtype
        )
    return make_matrix(ops, weights.load([f"{name}.weight" for name in names], rows, columns), bias)


class Attention:
    """Grouped-query attention over the paged cache.

    Attributes:
        tile: of its input, as `Matrix.tile`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, prefix: str) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._ops = ops
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self._rows = [heads * dim, kv_heads * dim, kv_heads * dim]
        self._eps = config.rms_norm_eps
        self._scale = dim**-0.5
        self._window = config.sliding_window
        names = [f"{prefix}.{part}_proj" for part in ("q", "k", "v")]
        if config.attention_bias and f"{names[0]}.bias" not in weights:
            raise ModelLoadError(f"{config.path} has no tensor {names[0]}.bias")
        self._qkv = load_matrix(ops, weights, names, self._rows, config.hidden_size)
        self.tile = self._qkv.tile
        out = [f"{prefix}.o_proj"]
        self._out = load_matrix(ops, weights, out, [config.hidden_size], heads * dim)
        self._kv_scales = _kv_scales(weights, prefix)
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = weights.load([f"{prefix}.q_norm.weight"], [dim])
            self._k_norm = weights.load([f"{prefix}.k_norm.weight"], [dim])

    def queries(self, x: Rows, batch: ForwardBatch, kv: KVView, cos_sin: Tensor) -> Tensor:
        """Write keys and values of the step to the cache; its queries, `[T, H, D]`."""
        tokens = len(batch.positions)
        q, k, v = torch.split(self._qkv(x), self._rows, dim=-1)
        return self._ops.rope_store_kv(
            q.view(tokens, self._heads, self._dim),
            k.view(tokens, self._kv_heads, self._dim),
            v.view(tokens, self._kv_heads, self._dim),
            batch.positions,
            cos_sin,
            kv.k,
            kv.v,
            batch.slot_mapping,
            self._q_norm,
            self._k_norm,
            self._eps,
            **self._scales(kv),
        )

    def attend(
        self,
        residual: Tensor,
        q: Tensor,
        singles: SingleQueries | None,
        many: ManyQueries | None,
        kv: KVView,
    ) -> Tensor | None:
        """What the queries of first `singles`, then `many` add to `residual` (`Matrix.onto`)."""
        return self._out.onto(residual, self._attended(q, singles, many, kv).flatten(1))

    def _attended(
        self, q: Tensor, singles: SingleQueries | None, many: ManyQueries | None, kv: KVView
    ) -> Tensor:
        if many is None:
            return q if singles is None else self._attend_singles(q, singles, kv)
        if singles is None:
            return self._attend_many(q, many, kv)
        count = len(singles.seq_lens)
        first = self._attend_singles(q[:count], singles, kv)
        return torch.cat((first, self._attend_many(q[count:], many, kv)))

    def _attend_singles(self, q: Tensor, rows: SingleQueries, kv: KVView) -> Tensor:
        return self._ops.paged_decode_attention(
            q,
            kv.k,
            kv.v,
            rows.block_tables,
            rows.seq_lens,
            self._scale,
            self._window,
            rows.max_seq_len,
            **self._scales(kv),
        )

    def _attend_many(self, q: Tensor, rows: ManyQueries, kv: KVView) -> Tensor:
        return self._ops.paged_prefill_attention(
            q,
            kv.k,
            kv.v,
            rows.block_tables,
            rows.query_start_loc,
            rows.seq_lens,
            self._scale,
            self._window,
            rows.max_query_len,
            **self._scales(kv),
        )

    def _scales(self, kv: KVView) -> dict[str, float]:
        """Of a cache of e4m3; others keep keys and values as they are."""
        return self._kv_scales if kv.k.dtype == torch.float8_e4m3fn else {}


class MLP:
    """`down(silu(gate(x)) * up(x))`.

    Attributes:
        tile: of its input, as `Matrix.tile`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, prefix: str) -> None:
        inner, hidden = config.intermediate_size, config.hidden_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load_matrix(ops, weights, names, [inner, inner], hidden)
        self.tile = self._gate_up.tile
        self._down = load_matrix(ops, weights, [f"{prefix}.down_proj"], [hidden], inner)

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        """As `Matrix.onto`."""
        return self._down.onto(residual, self._gate_up.gated(x, self._down.tile))


def _kv_scales(weights: Weights, prefix: str) -> dict[str, float]:
    """What a checkpoint's keys and values are to be divided by before they become e4m3, else 1."""
    scales = {}
    for kind in ("k", "v"):
        # the field's names, newest first
        for name in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale"):
            if f"{prefix}.{name}" in weights:
                scales[f"{kind}_scale"] = weights.number(f"{prefix}.{name}")
                break
    return scales


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """`[num_positions, D]` float32: D/2 cosines, then D/2 sines.

    Raises:
        ModelLoadError: the model scales RoPE by a rule that is not supported.
    """
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = _scaled(config, 1.0 / (config.rope_theta**exponents))
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scaled(config: ModelConfig, frequencies: Tensor) -> Tensor:
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    try:
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        if kind == "llama3":
            return _llama3_scaled(scaling, frequencies)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"RoPE scaling of {config.path} is not valid: {error!r}") from error
    raise ModelLoadError(
        f"RoPE scaling {kind!r} of {config.path} is not supported; supported are linear, llama3"
    )


def _llama3_scaled(scaling: dict[str, float], frequencies: Tensor) -> Tensor:
    """Low frequencies divided by `factor`, high ones kept, those between blended."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / float(scaling["factor"]) + smooth * frequencies
