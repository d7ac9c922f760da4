"""Compile every kernel, as its launcher launches it, for sm_90; needs no GPU. A script.

The launchers run on tensors without storage; their launches are compiled instead of run.
"""

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
            signature[param.name] = POINTERS[value.dtype] if is_tensor else "i32"
            unaligned = param.do_not_specialize or param.do_not_specialize_on_alignment
            if (is_tensor or value % 16 == 0) and not unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source_type = GluonASTSource if self.is_gluon() else ASTSource
    source = source_type(self, signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=kwargs)
    assert kernel.metadata.shared <= SHARED_MEMORY, (self.__name__, kernel.metadata.shared)
    compiled[self.__name__] = compiled.get(self.__name__, 0) + 1


def launch_all(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int, window: int):
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ops, tokens = TritonOps(), 300
    cache = empty(64, kv_heads, 2, 2, size, dim)
    k_cache, v_cache = cache[:, :, 1, 0], cache[:, :, 1, 1]
    q, k = empty(tokens, heads, dim), empty(tokens, kv_heads, dim)
    positions = empty(tokens, dtype=torch.int64)
    tables, lengths = empty(8, 32, dtype=torch.int32), empty(8, dtype=torch.int32)
    starts = empty(9, dtype=torch.int32)
    ops.store_kv(k, k, k_cache, v_cache, positions)
    ops.rope(q, k, positions, empty(1000, dim, dtype=torch.float32))
    table = empty(1000, dim, dtype=torch.float32)
    ops.rope_store_kv(q, k, k, positions, table, k_cache, v_cache, positions)
    norms = (empty(dim), empty(dim), 1e-5)
    ops.rope_store_kv(q, k, k, positions, table, k_cache, v_cache, positions, *norms)
    eights = empty(*cache.shape, dtype=torch.float8_e4m3fn)
    eights = (eights[:, :, 1, 0], eights[:, :, 1, 1])
    ops.store_kv(k, k, *eights, positions, 0.5, 2.0)
    ops.rope_store_kv(q, k, k, positions, table, *eights, positions, *norms, 0.5, 2.0)
    ops.rms_norm(q, empty(dim), 1e-5)
    ops.add_rms_norm(empty(tokens, 512), empty(tokens, 512), empty(512), 1e-5)
    ops.silu_mul(empty(tokens, 1024))
    launch_linears(ops, dtype)
    for tile in (0, 128):
        ops.quantise_rows(empty(tokens, 4096), tile)
        quantise_rows.silu_mul_fp8(empty(tokens, 2 * 14336), tile)
        ops.rms_norm_fp8(empty(tokens, 4096), empty(4096), 1e-5, tile)
        parts = empty(4, tokens, 4096, dtype=torch.float32)
        ops.add_rms_norm_fp8(parts, empty(tokens, 4096), empty(4096), 1e-5, tile)
    rows = positions[:8]
    state = (rows, rows, rows)
    inputs = ops.read_rows(rows, *state, tables, size, 32)
    ops.advance_rows(rows, inputs.input_ids, rows, rows, rows)
    ops.write_rows(rows, *state, *state)
    for hint in (0, 1):
        ops.paged_prefill_attention(q, k_cache, v_cache, tables, starts, lengths, 0.1, window, hint)
        ops.paged_decode_attention(
            q[:8], k_cache, v_cache, tables, lengths, 0.1, window, hint * 100
        )
    if (dtype, dim) == (torch.bfloat16, 128):
        rest = (tables, starts, lengths, 0.1)
        hopper_prefill_attention.hopper_prefill_attention(q, k_cache, v_cache, *rest)
        kv = k_cache.to(E4M3), v_cache.to(E4M3)
        unpack_pages(*kv, tables, lengths, 1.0, 1.0, dtype)
        ops.paged_prefill_attention(q, *kv, *rest, max_query_len=4)
        # few enough parts to be joined by one program
        ops.paged_decode_attention(q[:8], *kv, tables, lengths, 0.1, max_seq_len=400)
    kv_checksums(cache, positions[:4], 0, 3 * size + 1)
    sampling = make_tables(8, 1000 * dim, torch.device("meta"))
    for limits in (True, False):
        ops.sample_rows(empty(8, 1000 * dim), rows, rows, sampling, limits)


def launch_fp8_linear(ops: TritonOps, dtype: torch.dtype, tile: int) -> None:
    def matrix(rows: int, columns: int, high: int) -> Fp8Tensor:
        wide = columns // tile if tile else 1
        scale = torch.empty(-(-rows // high), wide, dtype=torch.float32, device="meta")
        return Fp8Tensor(torch.empty(rows, columns, dtype=E4M3, device="meta"), scale)

    for rows, columns in ((4096, 14336), (576, 512)):
        for tokens in (1, 64, 100):
            x, weight = matrix(tokens, columns, 1), matrix(rows, columns, tile or 1)
            bias = torch.empty(rows, dtype=dtype, device="meta")
            ops.fp8_linear(x, weight, dtype, bias)
            ops.fp8_linear_parts(x, weight, dtype)
            ops.fp8_gated_linear(x, weight, dtype, tile)
            # where it does not stream
            fp8_linear._launch(x, weight, bias, dtype, 1)
            fp8_linear._launch(x, weight, None, torch.float32, 2)


def launch_linears(ops: TritonOps, dtype: torch.dtype) -> None:
    weight, bias = (
        torch.empty(*shape, dtype=dtype, device="meta") for shape in ((4096, 4096), (4096,))
    )
    for rows in (1, 32, 128):
        x = torch.empty(rows, 4096, dtype=dtype, device="meta")
        ops.linear(x, weight, bias)
        ops.linear(x, weight, out=torch.empty(rows, 4096, device="meta"))
        ops.linear_parts(x, weight)
        ops.gated_linear(x, weight)


if __name__ == "__main__":
    JITFunction.run = compile_launch
    early_start._can = lambda device: True
    stream_check.streams = lambda device, eight_bits=False: True
    early_start._wanted.set(True)
    paged_decode_attention.num_multiprocessors = lambda device: 132
    tiles.converts_e4m3 = lambda device: True
    launch_all(torch.bfloat16, 32, 8, 128, 64, 0)
    for tile in (0, 128):
        launch_fp8_linear(TritonOps(), torch.bfloat16, tile)
    launch_all(torch.float32, 9, 3, 80, 16, 0)
    launch_all(torch.float16, 4, 4, 64, 32, 100)
    launch_all(torch.bfloat16, 4, 2, 256, 16, 0)
    print(compiled)
