"""Compile every kernel, as its launcher launches it, for sm_90; needs no GPU. A script.

The launchers run on tensors without storage; their launches are compiled instead of run.
"""

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from diptych.kernels import (
    early_start,
    fp8_linear,
    hopper_prefill_attention,
    paged_decode_attention,
    quantise_rows,
    stream_check,
    tiles,
)
from diptych.kernels.copy_runs import copy_runs
from diptych.kernels.fp8_tensor import E4M3, Fp8Tensor
from diptych.kernels.kv_checksums import kv_checksums
from diptych.kernels.sampling_tables import make_tables
from diptych.kernels.triton_ops import TritonOps
from diptych.kernels.unpack_pages import unpack_pages

SHARED_MEMORY = 232_448
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
compiled: dict[str, int] = {}


def compile_launch(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs) -> None:
    values = dict(zip(self.arg_names, args, strict=False))
    values |= {name: kwargs.pop(name) for name in list(kwargs) if name in self.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(self.params):
        value = values[param.name]
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype][1:]
            signature[param.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
            continue
        is_one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            is_tensor = isinstance(value, torch.Tensor)
            integer = "i64" if not is_tensor and value >= 1 << 31 else "i32"
            signature[param.name] = POINTERS[value.dtype] if is_tensor else integer
            unaligned = param.do_not_specialize or param.do_not_specialize_on_alignment
            if (is_tensor or value % 16 == 0) and not unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source_type = GluonASTSource if self.is_gluon() else ASTSource
    source = source_type(self, signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kwargs)
    assert kernel.metadata.shared <= SHARED_MEMORY, (self.__name__, kernel.metadata.shared)
    compiled[self.__name__] = compiled.get(self.__name__, 0) + 1


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int, window: int = 0
) -> None:
    """Everything whose code depends on heads and pages."""
    ops, tokens = TritonOps(), 300
    cache = empty(64, kv_heads, 2, 2, size, dim, dtype=dtype)
    caches = cache[:, :, 1, 0], cache[:, :, 1, 1]
    q, k = (empty(tokens, count, dim, dtype=dtype) for count in (heads, kv_heads))
    positions, table = empty(tokens, dtype=torch.int64), empty(1000, dim, dtype=torch.float32)
    ops.store_kv(k, k, *caches, positions)
    ops.rope(q, k, positions, table)
    ops.rope_store_kv(q, k, k, positions, table, *caches, positions)
    norms = (empty(dim, dtype=dtype), empty(dim, dtype=dtype), 1e-5)
    ops.rope_store_kv(q, k, k, positions, table, *caches, positions, *norms)
    eights = caches[0].to(E4M3), caches[1].to(E4M3)
    ops.store_kv(k, k, *eights, positions, 0.5, 2.0)
    ops.rope_store_kv(q, k, k, positions, table, *eights, positions, *norms, 0.5, 2.0)
    tables, lengths = empty(8, 32, dtype=torch.int32), empty(8, dtype=torch.int32)
    starts = empty(9, dtype=torch.int32)
    for hint in (0, 1):
        ops.paged_prefill_attention(q, *caches, tables, starts, lengths, 0.1, window, hint)
        ops.paged_decode_attention(q[:8], *caches, tables, lengths, 0.1, window, hint * 100)
    ops.rms_norm(q, norms[0], 1e-5)
    kv_checksums(cache, positions[:4], 0, 3 * size + 1)


def launch_hopper_attention(dtype: torch.dtype) -> None:
    """What only some heads and types take: prefill in Gluon, pages of e4m3."""
    ops, q = TritonOps(), empty(300, 32, 128, dtype=dtype)
    caches = [empty(64, 8, 64, 128, dtype=dtype)] * 2
    tables, lengths = empty(8, 32, dtype=torch.int32), empty(8, dtype=torch.int32)
    rest = (tables, empty(9, dtype=torch.int32), lengths, 0.1)
    hopper_prefill_attention.hopper_prefill_attention(q, *caches, *rest)
    eights = [cache.to(E4M3) for cache in caches]
    unpack_pages(*eights, tables, lengths, 1.0, 1.0, dtype)
    ops.paged_prefill_attention(q, *eights, *rest, max_query_len=4)
    # few enough parts to be joined by one program
    ops.paged_decode_attention(q[:8], *eights, tables, lengths, 0.1, max_seq_len=400)


def launch_rows(dtype: torch.dtype, vocab_size: int) -> None:
    """Everything whose code depends on the type, and not on heads."""
    ops, tokens = TritonOps(), 300
    weight, x = empty(4096, dtype=dtype), empty(tokens, 4096, dtype=dtype)
    ops.add_rms_norm(x, x, weight, 1e-5)
    ops.silu_mul(empty(tokens, 1024, dtype=dtype))
    for tile in (0, 128):
        ops.quantise_rows(x, tile)
        quantise_rows.silu_mul_fp8(empty(tokens, 2 * 14336, dtype=dtype), tile)
        ops.rms_norm_fp8(x, weight, 1e-5, tile)
        parts = empty(4, tokens, 4096, dtype=torch.float32)
        ops.add_rms_norm_fp8(parts, x, weight, 1e-5, tile)
    rows = empty(8, dtype=torch.int64)
    state = (rows, rows, rows)
    inputs = ops.read_rows(rows, *state, empty(8, 32, dtype=torch.int32), 64, 32)
    ops.advance_rows(rows, inputs.input_ids, rows, rows, rows)
    ops.write_rows(rows, *state, *state)
    sampling = make_tables(8, vocab_size, torch.device("meta"))
    for limits in (True, False):
        ops.sample_rows(empty(8, vocab_size, dtype=dtype), rows, rows, sampling, limits)


def launch_fp8_linears(dtype: torch.dtype, tile: int) -> None:
    def matrix(rows: int, columns: int, high: int) -> Fp8Tensor:
        wide = columns // tile if tile else 1
        scale = empty(-(-rows // high), wide, dtype=torch.float32)
        return Fp8Tensor(empty(rows, columns, dtype=E4M3), scale)

    ops = TritonOps()
    for rows, columns, counts in ((4096, 14336, (1, 64, 100)), (576, 512, (20,))):
        for tokens in counts:
            x, weight = matrix(tokens, columns, 1), matrix(rows, columns, tile or 1)
            bias = empty(rows, dtype=dtype)
            ops.fp8_linear(x, weight, dtype, bias)
            ops.fp8_linear_parts(x, weight, dtype)
            ops.fp8_gated_linear(x, weight, dtype, tile)
            # where it does not stream
            fp8_linear._launch(x, weight, bias, dtype, 1)
            fp8_linear._launch(x, weight, None, torch.float32, 2)


def launch_copies() -> None:
    starts = np.arange(3)
    for size in (16, 4096, 1 << 20, 17):
        runs = starts * size, starts * size, np.full(3, size)
        copy_runs(1 << 40, 1 << 41, *runs, torch.device("meta"))


def launch_linears(dtype: torch.dtype) -> None:
    ops, weight = TritonOps(), empty(4096, 4096, dtype=dtype)
    for rows in (1, 32, 128):
        x = empty(rows, 4096, dtype=dtype)
        ops.linear(x, weight, empty(4096, dtype=dtype))
        ops.linear(x, weight, out=empty(rows, 4096, dtype=torch.float32))
        ops.linear_parts(x, weight)
        ops.gated_linear(x, weight)


if __name__ == "__main__":
    JITFunction.run = compile_launch
    early_start._can = lambda device: True
    stream_check.streams = lambda device, eight_bits=False: True
    early_start._wanted.set(True)
    paged_decode_attention.num_multiprocessors = lambda device: 132
    tiles.converts_e4m3 = lambda device: True
    launch_attention(torch.bfloat16, 32, 8, 128, 64)
    launch_attention(torch.float32, 9, 3, 80, 16)
    launch_attention(torch.float16, 4, 4, 64, 32, window=100)
    launch_attention(torch.bfloat16, 4, 2, 256, 16)
    launch_hopper_attention(torch.bfloat16)
    launch_rows(torch.bfloat16, 128256)
    launch_rows(torch.float32, 80001)
    launch_linears(torch.bfloat16)
    launch_copies()
    for tile in (0, 128):
        launch_fp8_linears(torch.bfloat16, tile)
    print(compiled)
