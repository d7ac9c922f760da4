"""The decoder of Llama, Mistral, Qwen2 and Qwen3: they differ in what `ModelConfig` says.

Qwen2 has biases on q, k and v; Qwen3 norms each head's query and key; Mistral slides a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.dispatch import Ops
from diptych.models.config import ModelConfig
from diptych.models.layers import (
    MLP,
    Attention,
    ForwardBatch,
    KVView,
    LastTokens,
    rope_table,
)
from diptych.models.loader import Weights
from diptych.models.matrix import make_matrix
from diptych.models.norm import Norm


class LayerHooks(Protocol):
    """Called around each layer of a forward pass."""

    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...


class DecoderLayer:
    """Attention and MLP, each behind a norm, on a residual stream."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, index: int) -> None:
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        norm = weights.load([f"{prefix}.input_layernorm.weight"], [hidden])
        self._attention = Attention(config, weights, ops, f"{prefix}.self_attn")
        post_norm = weights.load([f"{prefix}.post_attention_layernorm.weight"], [hidden])
        self._mlp = MLP(config, weights, ops, f"{prefix}.mlp")
        self._norm = Norm(ops, norm, config.rms_norm_eps, self._attention.tile)
        self._post_norm = Norm(ops, post_norm, config.rms_norm_eps, self._mlp.tile)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        kv: KVView,
        cos_sin: Tensor,
        last: LastTokens | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """What is still to be added (`Matrix.onto`), and to what: `[T, N]`, or `[R, N]` of the
        `last` tokens. `residual` may be written over."""
        rows, residual = self._norm.add(x, residual)
        q = self._attention.queries(rows, batch, kv, cos_sin)
        if last is None:
            x = self._attention.attend(residual, q, batch.singles, batch.many, kv)
        else:
            residual = residual[last.index]
            if not len(last.index):
                return None, residual
            x = self._attention.attend(residual, q[last.index], last.queries, None, kv)
        rows, residual = self._post_norm.add(x, residual)
        return self._mlp.onto(residual, rows), residual


class Decoder:
    """From token ids to hidden states, and from hidden states to logits.

    Raises:
        ModelLoadError: a weight is missing or wrong, or RoPE scaling is not supported.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        num_positions: int,
        device: torch.device,
    ) -> None:
        self._cos_sin = rope_table(config, num_positions, device)
        size = ([config.vocab_size], config.hidden_size)
        self._embedding = weights.load(["model.embed_tokens.weight"], *size)
        self._layers = [DecoderLayer(config, weights, ops, i) for i in range(config.num_layers)]
        norm = weights.load(["model.norm.weight"], [config.hidden_size])
        self._norm = Norm(ops, norm, config.rms_norm_eps)
        if config.tie_word_embeddings:
            self._head = make_matrix(ops, self._embedding)
        else:
            self._head = make_matrix(ops, weights.load(["lm_head.weight"], *size))

    @contextmanager
    def only_first_layers(self, count: int) -> Iterator[None]:
        """Meanwhile the others are left out: as layers launch the same kernels, two of them show
        all that is compiled and all memory beside weights, in a fraction of the time."""
        layers = self._layers
        self._layers = layers[:count]
        try:
            yield
        finally:
            self._layers = layers

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""
        return self._embedding.dtype

    def forward(
        self, batch: ForwardBatch, kv: Sequence[KVView], hooks: LayerHooks | None = None
    ) -> Tensor:
        """Compute the step's tokens, write their KV.

        Returns:
            The last norm's output, `[T, N]`, or `[R, N]` of `batch.last`.
        """
        residual = functional.embedding(batch.input_ids, self._embedding)
        x: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if hooks is not None:
                hooks.wait_for_layer_load(index)
            last = batch.last if layer is self._layers[-1] else None
            x, residual = layer(x, residual, batch, kv[index], self._cos_sin, last)
            if hooks is not None:
                hooks.save_kv_layer(index)
        hidden, _ = self._norm.add(x, residual)
        assert isinstance(hidden, Tensor)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[R, N]` of `forward` to `[R, V]` logits of the same type, into `out` where given."""
        return self._head(hidden) if out is None else self._head.into(out, hidden)
