"""The streamed product is the library's, for few rows and any width, early starts included."""

import pytest
import torch

from diptych.kernels import reference

DEVICE = torch.device("cuda")
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("streams on Hopper only", allow_module_level=True)

from diptych.kernels.early_start import starting_early  # noqa: E402
from diptych.kernels.linear import gated_linear, linear, linear_parts  # noqa: E402
from diptych.kernels.rms_norm import add_rms_norm  # noqa: E402
from diptych.kernels.stream_check import streams  # noqa: E402
from diptych.kernels.stream_tiles import should_stream, stream_tiles  # noqa: E402
from diptych.kernels.streamed_linear import streamed_linear  # noqa: E402

# of Llama-3.1-8B and Qwen3-8B (q, k and v; out; down), and sizes that no tile divides
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (4096, 12288), (1000, 1544), (4104, 4104)]
ROWS = [1, 3, 8, 16, 17, 32, 63, 64, 100, 128]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def test_the_check_at_the_start_passes() -> None:
    assert streams(DEVICE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_is_exact_up_to_rounding(rows, shape) -> None:
    torch.manual_seed(rows)
    x, weight, bias = random(rows, shape[1]), random(*shape), random(shape[0]) * 30
    assert should_stream(x, weight)
    exact = x.double() @ weight.double().T
    assert off(linear(x, weight), exact) < 3e-3
    assert off(linear(x, weight, bias), exact + bias.double()) < 3e-3
    out = torch.full((rows, shape[0]), torch.nan, device=DEVICE)
    assert linear(x, weight, out=out) is out
    # the matrix unit cuts off, at 24 bits, each of its sums over 16 columns
    assert off(out, exact) < shape[1] / 16 * 2**-24
    assert off(reference.joined(linear_parts(x, weight), torch.float32), exact) < 3e-3


@pytest.mark.parametrize("shape", [(28672, 4096), (24576, 4096), (2000, 1544)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_halves_are_gated(rows, shape) -> None:
    torch.manual_seed(rows)
    x, weight = random(rows, shape[1]), random(*shape) / 50
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert off(gated_linear(x, weight), torch.nn.functional.silu(gate) * up) < 3e-3


@pytest.mark.parametrize("rows", ROWS)
def test_every_element_is_written_and_nothing_beyond(rows) -> None:
    torch.manual_seed(0)
    x, weight = random(rows, 1544), random(1000, 1544)
    for options in ({}, {"parts": True}):
        tiles = stream_tiles(rows, 1000, 1544, **options)
        shape = (rows, 1000) if tiles.splits == 1 else (tiles.splits, rows, 1000)
        guarded = torch.full((2 + tiles.splits * rows, 1000), torch.nan, device=DEVICE)
        out = guarded[1:-1].view(shape)
        streamed_linear(x, weight, tiles, out=out)
        assert not out.isnan().any()
        assert guarded[0].isnan().all()
        assert guarded[-1].isnan().all()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_kernels_that_start_early_wait_for_what_they_read(rows) -> None:
    """A chain in which each kernel reads what the one before wrote, replayed on new inputs."""
    torch.manual_seed(0)
    hidden, inner = 2048, 6144
    layers = [
        (random(2 * inner, hidden) / 30, random(hidden, inner) / 30, random(hidden))
        for _ in range(12)
    ]
    x = random(rows, hidden)

    def chain(sync: bool) -> torch.Tensor:
        part, residual = x, x
        for gate_up, down, norm in layers:
            for _ in range(3):
                normed, residual = add_rms_norm(part, residual, norm, 1e-5)
                gated = gated_linear(normed, gate_up)
                if sync:
                    torch.cuda.synchronize()
                part = linear_parts(gated, down)
                if sync:
                    torch.cuda.synchronize()
        return residual

    graph = torch.cuda.CUDAGraph()
    with starting_early():
        chain(False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = chain(False)
    for _ in range(5):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(True))
