"""What `diptych bench kernels` measures: cases, floors and times."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from diptych.bench.offline import say
from diptych.bench.report import write_result
from diptych.bench.sampling_calls import sampling_calls
from diptych.errors import ConfigError
from diptych.kernels.attention_spec import AttentionSpec
from diptych.kernels.dispatch import Ops, select_ops

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 32, 8, 128, 4096, 14336, 128256
DECODES = [(1, 1024), (1, 32768), (8, 8192), (32, 8192), (64, 1024)]
PREFILLS = [(1, 1024), (1, 4096), (1, 8192), (1, 32768), (16, 1024)]
BYTES = 2
# the op, outputs and inputs of the layers' matrices, and of the head
LINEARS = {
    "qkv linear": ("linear", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out linear": ("linear_parts", HIDDEN, HEADS * HEAD_DIM),
    "gate-up linear": ("gated_linear", 2 * INNER, HIDDEN),
    "down linear": ("linear_parts", HIDDEN, INNER),
    "head linear": ("linear", VOCAB, HIDDEN),
}
FP8_LINEARS = {
    name: (f"fp8_{op}", width, size)
    for name, (op, width, size) in LINEARS.items()
    if name != "head linear"
}
_FP8_RATE = 1490 / 790
SAMPLED = (1, 8, 64, 256)
LINEAR_TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024)
# weights are taken in turn from this many bytes, far more than a cache holds
_WEIGHT_BYTES = 1 << 30
# keys of a tile, warps, stages; and before them the rows of a tile
DECODE_TILES = [(64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 8, 3), (128, 8, 5), (32, 4, 5)]
PREFILL_TILES = [
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 32, 8, 3),
    (64, 64, 4, 3),
    (64, 128, 4, 3),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One timed call, of the op `count` times.

    Attributes:
        bytes, flops: of one op, at least.
        matrix_rate: of the matrix units, over that of bfloat16.
    """

    name: str
    call: Callable[[], object]
    bytes: float
    flops: float = 0.0
    count: int = 1
    matrix_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """What one case took; `ratio` is over the floor, 1 the best possible."""

    name: str
    time_us: float
    floor_us: float
    ratio: float
    tb_per_s: float
    tflop_per_s: float


def run(args: argparse.Namespace) -> int:
    """Measure, print, report.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels needs a CUDA device, and torch sees none")
    device = torch.device(args.device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    timings = []
    say(f"{'kernel':44} {'us':>9} {'floor':>9} {'ratio':>6} {'TB/s':>6} {'TFLOP/s':>8}")
    with torch.inference_mode():
        for case in _tune_cases(device, args) if args.tune else _cases(device, args):
            timing = _measure(case, args)
            timings.append(timing)
            say(
                f"{timing.name:44} {timing.time_us:9.1f} {timing.floor_us:9.1f} "
                f"{timing.ratio:6.2f} {timing.tb_per_s:6.2f} {timing.tflop_per_s:8.0f}"
            )
    payload = {
        "settings": {
            "num_layers": args.num_layers,
            "bandwidth_tb_per_s": args.bandwidth_tb_per_s,
            "peak_tflop_per_s": args.peak_tflop_per_s,
            "shape": f"{HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, bfloat16",
        },
        "timings": [asdict(timing) for timing in timings],
    }
    name = "kernels-tune" if args.tune else "kernels"
    path = write_result(name, payload, device=str(device), directory=args.result_dir)
    say(f"wrote {path}")
    return 0


def _measure(case: Case, args: argparse.Namespace) -> Timing:
    from triton.testing import do_bench_cudagraph

    from diptych.kernels.early_start import starting_early

    # it runs on a stream of its own, which does not wait for the inputs
    torch.cuda.synchronize()
    with starting_early():
        seconds = do_bench_cudagraph(case.call, return_mode="median") / 1e3 / case.count
    floor = max(
        case.bytes / (args.bandwidth_tb_per_s * 1e12),
        case.flops / (args.peak_tflop_per_s * case.matrix_rate * 1e12),
    )
    return Timing(
        case.name,
        seconds * 1e6,
        floor * 1e6,
        seconds / floor,
        case.bytes / seconds / 1e12,
        case.flops / seconds / 1e12,
    )


def _cases(device: torch.device, args: argparse.Namespace) -> Iterator[Case]:
    """One at a time, so that one cache is alive at a time."""
    layers = args.num_layers
    dtype = torch.bfloat16
    for size in args.block_size:
        spec = AttentionSpec(dtype, dtype, HEADS, KV_HEADS, HEAD_DIM, size)
        ops = select_ops(device, args.attention_backend, spec)
        for batch, context in DECODES:
            name = f"decode attention B{batch}@{context} block {size}"
            if args.only in name:
                decode = ops.paged_decode_attention
                yield _decode_case(decode, name, batch, context, size, layers, device)
        for batch, length in PREFILLS:
            name = f"prefill attention {batch}x{length} block {size}"
            if args.only in name:
                prefill = ops.paged_prefill_attention
                yield _prefill_case(prefill, name, batch, length, size, layers, device)
    for tokens, name in itertools.product(LINEAR_TOKENS, LINEARS):
        if args.only in f"{name} {tokens}":
            yield _linear_case(ops, name, tokens, device)
    for tokens, name in itertools.product(LINEAR_TOKENS, FP8_LINEARS):
        if args.only in f"fp8 {name} {tokens}":
            yield _fp8_linear_case(ops, name, tokens, device)
    for batch in SAMPLED:
        cases = _sampling_cases(ops, batch, VOCAB, device)
        yield from (case for case in cases if args.only in case.name)
    for tokens in (1, 64, 8192):
        yield from (
            case for case in _elementwise_cases(ops, tokens, device) if args.only in case.name
        )


def _tune_cases(device: torch.device, args: argparse.Namespace) -> Iterator[Case]:
    """Attention over the shapes of tiles that are worth a look."""
    from diptych.kernels.paged_decode_attention import DecodeTiles, paged_decode_attention
    from diptych.kernels.paged_prefill_attention import PrefillTiles, paged_prefill_attention

    for size, (batch, context) in itertools.product(args.block_size, DECODES):
        for tiles, splits in itertools.product(DECODE_TILES, (None, 4, 8, 16)):
            name = f"decode B{batch}@{context}/{size} {tiles} splits {splits or 'auto'}"
            if args.only in name:
                decode = partial(
                    paged_decode_attention, tiles=DecodeTiles(*tiles), num_splits=splits
                )
                yield _decode_case(decode, name, batch, context, size, args.num_layers, device)
    for size, (batch, length) in itertools.product(args.block_size, PREFILLS):
        for shape in PREFILL_TILES:
            name = f"prefill {batch}x{length}/{size} {shape}"
            if args.only in name:
                prefill = partial(paged_prefill_attention, tiles=PrefillTiles(*shape))
                yield _prefill_case(prefill, name, batch, length, size, args.num_layers, device)


def _cache(
    batch: int, context: int, block_size: int, num_layers: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """A middle layer's keys and values in the engine's layout, and scrambled block tables."""
    per_sequence = -(-context // block_size)
    num_blocks, layer = batch * per_sequence, num_layers // 2
    kv = torch.empty(
        (num_blocks, KV_HEADS, num_layers, 2, block_size, HEAD_DIM),
        dtype=torch.bfloat16,
        device=device,
    )
    kv[:, :, layer].normal_()
    tables = torch.randperm(num_blocks, device=device).int().view(batch, per_sequence)
    return kv[:, :, layer, 0], kv[:, :, layer, 1], tables


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _decode_case(
    attend: Callable[..., Tensor],
    name: str,
    batch: int,
    context: int,
    block_size: int,
    layers: int,
    device: torch.device,
) -> Case:
    k, v, tables = _cache(batch, context, block_size, layers, device)
    q = _random(batch, HEADS, HEAD_DIM, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Case(
        name,
        lambda: attend(q, k, v, tables, lengths, HEAD_DIM**-0.5, 0, context),
        bytes=2.0 * batch * context * KV_HEADS * HEAD_DIM * BYTES,
        flops=4.0 * batch * context * HEADS * HEAD_DIM,
    )


def _prefill_case(
    attend: Callable[..., Tensor],
    name: str,
    batch: int,
    length: int,
    block_size: int,
    layers: int,
    device: torch.device,
) -> Case:
    k, v, tables = _cache(batch, length, block_size, layers, device)
    q = _random(batch * length, HEADS, HEAD_DIM, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    return Case(
        name,
        lambda: attend(q, k, v, tables, starts, lengths, HEAD_DIM**-0.5, 0, length),
        bytes=2.0 * batch * length * (KV_HEADS + HEADS) * HEAD_DIM * BYTES,
        flops=2.0 * batch * length * length * HEADS * HEAD_DIM,
    )


def _linear_case(ops: Ops, name: str, tokens: int, device: torch.device) -> Case:
    """Over enough weights in turn that none is found in a cache."""
    op, width, size = LINEARS[name]
    multiply = getattr(ops, op)
    count = max(_WEIGHT_BYTES // (width * size * BYTES), 1) if device.type == "cuda" else 1
    weights = [_random(width, size, device=device) for _ in range(count)]
    x = _random(tokens, size, device=device)
    return Case(
        f"{name} {tokens}",
        lambda: [multiply(x, weight) for weight in weights],
        bytes=float(width * size + tokens * (width + size)) * BYTES,
        flops=2.0 * tokens * width * size,
        count=count,
    )


def _fp8_linear_case(ops: Ops, name: str, tokens: int, device: torch.device) -> Case:
    """As `_linear_case`, in e4m3 with scales of rows; rounding the rows is not in it."""
    op, width, size = FP8_LINEARS[name]
    multiply = getattr(ops, op)
    count = max(_WEIGHT_BYTES // (width * size), 1) if device.type == "cuda" else 1
    weights = [ops.quantise_rows(_random(width, size, device=device)) for _ in range(count)]
    x = ops.quantise_rows(_random(tokens, size, device=device))
    return Case(
        f"fp8 {name} {tokens}",
        lambda: [multiply(x, weight, torch.bfloat16) for weight in weights],
        bytes=float(width * size + tokens * (width * BYTES + size)),
        flops=2.0 * tokens * width * size,
        count=count,
        matrix_rate=_FP8_RATE,
    )


def _sampling_cases(ops: Ops, batch: int, vocab_size: int, device: torch.device) -> Iterator[Case]:
    """The floor is that of reading the logits once."""
    for name, call in sampling_calls(ops, batch, vocab_size, device):
        yield Case(f"sample {batch} {name}", call, float(batch * vocab_size) * BYTES)


def _elementwise_cases(ops: Ops, tokens: int, device: torch.device) -> Iterator[Case]:
    x, residual = _random(2, tokens, HIDDEN, device=device)
    weight, gate_up = _random(HIDDEN, device=device), _random(tokens, 2 * INNER, device=device)
    qkv = _random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
    positions = torch.arange(tokens, device=device)
    cos_sin = torch.randn(tokens, HEAD_DIM, device=device)
    k_cache, v_cache, _ = _cache(1, max(tokens, 64), 64, 1, device)
    row = float(tokens * BYTES)
    yield Case(f"rms_norm {tokens}", lambda: ops.rms_norm(x, weight, 1e-5), 2 * row * HIDDEN)
    yield Case(
        f"add_rms_norm {tokens}",
        lambda: ops.add_rms_norm(x, residual, weight, 1e-5),
        4 * row * HIDDEN,
    )
    yield Case(
        f"rope {tokens}",
        lambda: ops.rope(q, k, positions, cos_sin),
        2 * row * (HEADS + KV_HEADS) * HEAD_DIM,
    )
    yield Case(
        f"store_kv {tokens}",
        lambda: ops.store_kv(k, v, k_cache, v_cache, positions),
        4 * row * KV_HEADS * HEAD_DIM,
    )
    yield Case(
        f"rope_store_kv {tokens}",
        lambda: ops.rope_store_kv(q, k, v, positions, cos_sin, k_cache, v_cache, positions),
        2 * row * (HEADS + 2 * KV_HEADS) * HEAD_DIM,
    )
    yield Case(
        f"add_rms_norm_fp8 {tokens}",
        lambda: ops.add_rms_norm_fp8(x, residual, weight, 1e-5),
        3.5 * row * HIDDEN,
    )
    yield Case(f"quantise_rows {tokens}", lambda: ops.quantise_rows(x), 1.5 * row * HIDDEN)
    yield Case(f"silu_mul {tokens}", lambda: ops.silu_mul(gate_up), 3 * row * INNER)
