"""Choose who runs the ops: torch on a CPU, Triton on a GPU, or as the configuration says."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from diptych.errors import ConfigError
from diptych.kernels.attention_spec import AttentionSpec
from diptych.kernels.fp8_tensor import Fp8Tensor, Rows
from diptych.kernels.row_inputs import RowInputs
from diptych.kernels.sampling_tables import SamplingTables


class Ops(Protocol):
    """The ops of `reference.py` and `fp8_tensor.py`: same names, signatures and meaning.

    An `Ops` serves one thread: it may keep workspaces and plans from one call to the next.
    """

    @property
    def capturable(self) -> bool:
        """Whether decode steps of these ops may be captured in a CUDA graph: no value on the
        device decides a launch."""
        ...

    @property
    def prefill_capturable(self) -> bool:
        """Whether steps of prompts may be, too."""
        ...

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None: ...

    def paged_prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int = 0,
        max_query_len: int = 0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor: ...

    def paged_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int = 0,
        max_seq_len: int = 0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def linear_onto(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None: ...

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    def rope_store_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor: ...

    def silu_mul(self, x: Tensor) -> Tensor: ...

    def quantise_rows(self, x: Tensor, tile: int = 0) -> Fp8Tensor: ...

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float, tile: int = 0) -> Fp8Tensor: ...

    def add_rms_norm_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, tile: int = 0
    ) -> tuple[Fp8Tensor, Tensor]: ...

    def fp8_linear(
        self, x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor: ...

    def fp8_gated_linear(
        self, x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, tile: int | None = None
    ) -> Rows: ...

    def fp8_linear_parts(self, x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> Tensor: ...

    def read_rows(
        self,
        order: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        prompt_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        width: int,
    ) -> RowInputs: ...

    def sample_rows(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingTables,
        limits: bool = True,
    ) -> Tensor: ...

    def advance_rows(
        self,
        order: Tensor,
        sampled: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        tokens: Tensor,
    ) -> None: ...

    def write_rows(
        self,
        rows: Tensor,
        new_tokens: Tensor,
        new_positions: Tensor,
        new_prompt_lens: Tensor,
        last_tokens: Tensor,
        positions: Tensor,
        prompt_lens: Tensor,
    ) -> None: ...


def select_ops(
    device: torch.device, attention_backend: str = "auto", spec: AttentionSpec | None = None
) -> Ops:
    """The ops for a device.

    Args:
        device: where the tensors live.
        attention_backend: `auto` (the best for a GPU, torch elsewhere), `torch`, `triton`, or
            `fa3` (Triton, but FlashAttention-3 for prefill attention). Triton on a CPU runs only
            under its interpreter (`TRITON_INTERPRET=1`).
        spec: of the model's attention, which the backends for some heads ask for.

    Raises:
        ConfigError: what was asked for (or implied by the device) cannot run, or is wrong here.
    """
    if attention_backend == "torch" or (attention_backend == "auto" and device.type != "cuda"):
        from diptych.kernels.torch_ops import TorchOps

        return TorchOps()
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"attention_backend {attention_backend} needs a GPU; on a CPU use torch")
    try:
        from diptych.kernels.prefill_backends import choose_prefill
        from diptych.kernels.triton_ops import TritonOps
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"attention_backend {attention_backend} needs the package {error.name}: install it, "
            "or set attention_backend to torch"
        ) from error
    return TritonOps(choose_prefill(device, attention_backend, spec))
