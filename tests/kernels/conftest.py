"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def _repair_interpreter() -> None:
    """Make Triton 3.6's interpreter compute what a GPU does.

    It takes loop bounds by `int(array of one)`, which numpy 2.4 refuses; it truncates to bfloat16
    and to e4m3 instead of rounding; and it multiplies matrices of bfloat16 as the integers that
    hold them.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    cast, dot, convert = builder.cast_impl, builder.create_dot, interpreter._convert_float
    handle, tl = interpreter.TensorHandle, interpreter.tl

    def patch_tensor_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def cast_rounding(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            data = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return handle(data.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, source, target)

    def convert_rounding(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding)
        types = {
            tl.float8e4nv: (torch.uint8, torch.float8_e4m3fn),
            tl.bfloat16: (torch.uint16, torch.bfloat16),
            tl.float16: (torch.uint16, torch.float16),
            tl.float32: (torch.uint32, torch.float32),
        }
        (_, kind), (raw, wanted) = types[source], types[target]
        bits = np.ascontiguousarray(data).view(f"uint{source.primitive_bitwidth}")
        return torch.from_numpy(bits).view(kind).to(wanted).view(raw).numpy()

    def dot_of_floats(self: Any, a: Any, b: Any, *args: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *args)

    interpreter._patch_lang_tensor = patch_tensor_index
    interpreter._convert_float = convert_rounding
    builder.cast_impl = cast_rounding
    builder.create_dot = dot_of_floats


if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    _repair_interpreter()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class PagedKV:
    """A cache of random tokens; every slot that no sequence owns is NaN."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


@pytest.fixture
def paged_kv(device: torch.device) -> Callable[..., PagedKV]:
    """Make a cache for sequences of some lengths, in scrambled blocks.

    It is one layer's view of the engine's layout, or of one with the head inside the slot.
    """

    def make(
        lengths: list[int],
        heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        slot_outermost: bool = False,
    ) -> PagedKV:
        torch.manual_seed(0)
        counts = [-(-length // block_size) for length in lengths]
        size = sum(counts) + 3
        if slot_outermost:
            kv = torch.full((size, 2, 2, block_size, heads, dim), torch.nan, dtype=dtype)
            kv = kv.permute(0, 4, 1, 2, 3, 5)
        else:
            kv = torch.full((size, heads, 2, 2, block_size, dim), torch.nan, dtype=dtype)
        free = iter((torch.randperm(sum(counts)) + 3).tolist())
        # an entry that is no block, to be read by nobody
        block_tables = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
        for i, length in enumerate(lengths):
            for j in range(counts[i]):
                block_tables[i, j] = block = next(free)
                n = min(block_size, length - j * block_size)
                kv[block, :, 1, :, :n] = torch.randn(heads, 2, n, dim).to(dtype)
        kv = kv.to(device)
        return PagedKV(
            kv[:, :, 1, 0],
            kv[:, :, 1, 1],
            block_tables.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )

    return make
