"""The ops in plain torch, arranged for speed on a CPU.

At batch 1 a torch call costs more than its arithmetic, so whatever depends only on block tables,
lengths, slots or positions is planned once and reused while they stay equal: all layers of a step
share one plan. Plans are compared by content, so a caller may update its tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels import fp8_tensor, reference
from diptych.kernels.host_memory import keep_freed_memory
from diptych.kernels.torch_plan import (
    AttentionPlan,
    AttentionShape,
    ManyQueries,
    SingleQueries,
    plan_attention,
)

P = TypeVar("P")


class _Memo(Generic[P]):
    """The last plan, kept while a call brings equal inputs."""

    def __init__(self) -> None:
        self._constants: object = None
        self._tensors: tuple[Tensor, ...] = ()
        self._plan: P

    def get(self, constants: object, tensors: tuple[Tensor, ...], make: Callable[[], P]) -> P:
        if constants != self._constants or not all(map(_equal, tensors, self._tensors)):
            self._plan = make()
            self._constants = constants
            self._tensors = tuple(tensor.clone() for tensor in tensors)
        return self._plan


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


class TorchOps:
    """`dispatch.Ops` by torch alone. Equal to `reference.py` up to rounding.

    Making one sets the allocator of the process up for it (`keep_freed_memory`).
    """

    capturable = prefill_capturable = False

    def __init__(self) -> None:
        keep_freed_memory()
        self._slots: _Memo[tuple[Tensor, Tensor, Tensor | None]] = _Memo()
        self._prefill: _Memo[AttentionPlan] = _Memo()
        self._decode: _Memo[AttentionPlan] = _Memo()
        self._rotation: _Memo[tuple[Tensor, Tensor, Tensor]] = _Memo()
        self._eps: dict[tuple[float, torch.device], Tensor] = {}

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        def make() -> tuple[Tensor, Tensor, Tensor | None]:
            kept = slot_mapping >= 0
            slots = slot_mapping[kept]
            return slots // size, slots % size, None if bool(kept.all()) else kept

        size = k_cache.shape[2]
        blocks, offsets, kept = self._slots.get(size, (slot_mapping,), make)
        if kept is not None:
            k, v = k[kept], v[kept]
        k_cache[blocks, :, offsets] = reference.to_cache(k, k_cache.dtype, k_scale)
        v_cache[blocks, :, offsets] = reference.to_cache(v, v_cache.dtype, v_scale)

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
    ) -> Tensor:
        shape = AttentionShape(q.shape[1], k_cache.shape[1], k_cache.shape[2], sliding_window)
        plan = self._prefill.get(
            shape,
            (block_tables, query_start_loc, seq_lens),
            lambda: plan_attention(shape, block_tables, query_start_loc.tolist(), seq_lens),
        )
        out = _attend(plan, q, k_cache, v_cache, scale * k_scale)
        return out if v_scale == 1.0 else out * v_scale

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
    ) -> Tensor:
        shape = AttentionShape(q.shape[1], k_cache.shape[1], k_cache.shape[2], sliding_window)
        plan = self._decode.get(
            shape,
            (block_tables, seq_lens),
            lambda: plan_attention(shape, block_tables, None, seq_lens),
        )
        out = _attend(plan, q, k_cache, v_cache, scale * k_scale)
        return out if v_scale == 1.0 else out * v_scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return reference.rms_norm(x, weight, eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        eps_tensor = self._eps.get((eps, x.device))
        if eps_tensor is None:
            eps_tensor = self._eps[eps, x.device] = torch.tensor(eps, device=x.device)
        mean_square = torch.addcmul(eps_tensor, norm, norm, value=1.0 / x.shape[-1])
        return (x * weight).mul_(mean_square.rsqrt_())

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = reference.joined(x, residual.dtype) + residual
        return self.rms_norm(total, weight, eps), total

    def rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor, Tensor]:
            cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
            # the table is kept, so that no other comes to lie at its address
            return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), cos_sin

        # two halves rotate as x * cos + (x2, x1) * (-sin, sin)
        cos, sin, _ = self._rotation.get(cos_sin.data_ptr(), (positions,), make)
        heads = q.shape[1]
        x = torch.cat((q, k), dim=1).float()
        y = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(q.dtype)
        return y[:, :heads], y[:, heads:]

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
    ) -> Tensor:
        if q_weight is not None and k_weight is not None:
            q = self.rms_norm(q.contiguous(), q_weight, eps)
            k = self.rms_norm(k.contiguous(), k_weight, eps)
        q, k = self.rope(q, k, positions, cos_sin)
        self.store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return q

    def silu_mul(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return reference.silu_mul(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    linear = staticmethod(reference.linear)
    linear_parts = staticmethod(functional.linear)
    linear_onto = staticmethod(reference.linear_onto)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.silu_mul(functional.linear(x, weight))

    quantise_rows = staticmethod(fp8_tensor.quantise_rows)
    rms_norm_fp8 = staticmethod(fp8_tensor.rms_norm_fp8)
    add_rms_norm_fp8 = staticmethod(fp8_tensor.add_rms_norm_fp8)
    fp8_gated_linear = staticmethod(fp8_tensor.fp8_gated_linear)
    fp8_linear = staticmethod(fp8_tensor.fp8_linear)
    fp8_linear_parts = staticmethod(fp8_tensor.fp8_linear_parts)
    read_rows = staticmethod(reference.read_rows)
    advance_rows = staticmethod(reference.advance_rows)
    write_rows = staticmethod(reference.write_rows)
    sample_rows = staticmethod(reference.sample_rows)


def _attend(
    plan: AttentionPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> Tensor:
    if len(plan.singles) == 1 and plan.singles[0].q_rows is None:
        return _attend_singles(plan.singles[0], q, k_cache, v_cache, scale)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for singles in plan.singles:
        rows = singles.q_rows
        if rows is None:
            rows = torch.arange(singles.count, device=q.device)
        attended = _attend_singles(singles, q.index_select(0, rows), k_cache, v_cache, scale)
        out.index_copy_(0, rows, attended)
    for many in plan.many:
        _attend_many(many, q, k_cache, v_cache, scale, out)
    return out


def _attend_singles(
    plan: SingleQueries, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> Tensor:
    """`[n, H, D]`."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    batch = plan.count * num_kv_heads
    # [n * H_kv, c, D]
    k = _gather(k_cache, plan.blocks).view(batch, -1, head_dim).float()
    v = _gather(v_cache, plan.blocks).view(batch, -1, head_dim).float()
    if plan.span is not None:
        k, v = k[:, slice(*plan.span)], v[:, slice(*plan.span)]
    if plan.dead is not None:
        k.view(-1, head_dim).index_fill_(0, plan.dead, 0.0)
        v.view(-1, head_dim).index_fill_(0, plan.dead, 0.0)
    # [n * H_kv, G, D]
    grouped = q.reshape(batch, -1, head_dim).float()
    bias = grouped[:, :, :1] if plan.bias is None else plan.bias
    scores = torch.baddbmm(
        bias, grouped, k.transpose(1, 2), beta=0 if plan.bias is None else 1, alpha=scale
    )
    return torch.bmm(scores.softmax(-1), v).view(q.shape).to(q.dtype)


def _attend_many(
    plan: ManyQueries, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor
) -> None:
    """Write the rows of `out` that belong to this sequence."""
    num_heads, (num_kv_heads, head_dim) = q.shape[1], k_cache.shape[1::2]
    # [H_kv, c, D]
    k = _gather(k_cache, plan.blocks).view(num_kv_heads, -1, head_dim).float()
    v = _gather(v_cache, plan.blocks).view(num_kv_heads, -1, head_dim).float()
    for tile in plan.tiles:
        n, c = tile.end - tile.start, tile.last - tile.first
        # [H_kv, G * n, D]
        grouped = q[tile.start : tile.end].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        keys = k[:, tile.first : tile.last].transpose(1, 2)
        scores = torch.bmm(grouped.float(), keys).mul_(scale)
        scores.view(num_heads, n, c)[:, :, -tile.bias.shape[1] :].add_(tile.bias)
        attended = torch.bmm(scores.softmax(-1), v[:, tile.first : tile.last])
        out[tile.start : tile.end] = attended.view(num_heads, n, head_dim).transpose(0, 1)


def _gather(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows `block * H_kv + head` of a cache: `[len(rows), block_size, D]`."""
    num_blocks, heads, block_size, head_dim = cache.shape
    if cache.stride(0) == heads * cache.stride(1):
        return cache.view(num_blocks * heads, block_size, head_dim).index_select(0, rows)
    return cache[rows // heads, rows % heads]
