"""The ops in Triton. Import this only where Triton is to run."""

from __future__ import annotations

from diptych.kernels.attention_spec import PrefillAttention
from diptych.kernels.decode_rows import advance_rows, read_rows, write_rows
from diptych.kernels.fa3_prefill_attention import Fa3Prefill
from diptych.kernels.fp8_linear import fp8_gated_linear, fp8_linear, fp8_linear_parts
from diptych.kernels.linear import gated_linear, linear, linear_onto, linear_parts
from diptych.kernels.paged_decode_attention import PagedDecode
from diptych.kernels.paged_prefill_attention import paged_prefill_attention
from diptych.kernels.quantise_rows import quantise_rows
from diptych.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from diptych.kernels.rope import rope
from diptych.kernels.rope_store_kv import rope_store_kv
from diptych.kernels.sample_rows import sample_rows
from diptych.kernels.silu_mul import silu_mul
from diptych.kernels.store_kv import store_kv


class TritonOps:
    """`dispatch.Ops` by Triton kernels, prefill attention by whom the caller chose."""

    capturable = True

    def __init__(self, prefill: PrefillAttention = paged_prefill_attention) -> None:
        self.paged_prefill_attention = prefill
        self.prefill_capturable = not isinstance(prefill, Fa3Prefill)  # which nobody has tried
        self.paged_decode_attention = PagedDecode()

    store_kv = staticmethod(store_kv)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rope = staticmethod(rope)
    rope_store_kv = staticmethod(rope_store_kv)
    silu_mul = staticmethod(silu_mul)
    linear = staticmethod(linear)
    linear_parts = staticmethod(linear_parts)
    linear_onto = staticmethod(linear_onto)
    gated_linear = staticmethod(gated_linear)
    quantise_rows = staticmethod(quantise_rows)
    rms_norm_fp8 = staticmethod(rms_norm_fp8)
    add_rms_norm_fp8 = staticmethod(add_rms_norm_fp8)
    fp8_gated_linear = staticmethod(fp8_gated_linear)
    fp8_linear = staticmethod(fp8_linear)
    fp8_linear_parts = staticmethod(fp8_linear_parts)
    read_rows = staticmethod(read_rows)
    advance_rows = staticmethod(advance_rows)
    write_rows = staticmethod(write_rows)
    sample_rows = staticmethod(sample_rows)
