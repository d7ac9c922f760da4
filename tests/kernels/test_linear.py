"""Which products stream, in which tiles; what does not stream is the library's product."""

import pytest
import torch

from diptych.kernels import reference

kernels = pytest.importorskip("diptych.kernels.linear")
stream_tiles = pytest.importorskip("diptych.kernels.stream_tiles")

SHARED_MEMORY = 232_448
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (4096, 12288), (128256, 4096), (1000, 1544)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 64, 65, 128])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("options", [{}, {"parts": True}, {"gated": True}], ids=str)
def test_tiles_hold_the_rows_and_fit_in_shared_memory(rows, shape, options, fp8) -> None:
    tiles = stream_tiles.stream_tiles(rows, *shape, fp8=fp8, **options)
    assert rows <= tiles.rows
    assert tiles.lag < tiles.stages
    assert options.get("parts") or tiles.splits == 1
    weight_rows = tiles.weight_rows * (2 if options.get("gated") else 1)
    stage = (weight_rows + tiles.rows) * tiles.columns * (1 if fp8 else 2) + 8
    assert tiles.stages * stage <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_does_not_stream_is_the_reference(dtype) -> None:
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((3, 64), (48, 64), (48,)))
    assert not stream_tiles.should_stream(x, weight)
    out = torch.full((3, 48), torch.nan)
    assert kernels.linear(x, weight, bias, out) is out
    assert torch.equal(out, reference.linear(x, weight, bias).float())
    out = torch.full((3, 48), torch.nan, dtype=dtype)
    assert kernels.linear(x, weight, out=out) is out
    torch.testing.assert_close(out, reference.linear(x, weight))
    assert torch.equal(kernels.linear_parts(x, weight), reference.linear_parts(x, weight))


@pytest.mark.parametrize("rows", [3, kernels._MANY_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_onto_a_residual_is_added_now_or_by_the_norm(rows, dtype) -> None:
    torch.manual_seed(0)
    x, weight, residual = (torch.randn(*s).to(dtype) for s in ((rows, 64), (48, 64), (rows, 48)))
    expected = residual + reference.linear(x, weight)
    part = kernels.linear_onto(x, weight, residual)
    total = residual if part is None else residual + part
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    assert (part is None) == (rows > 3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("found", [1e-3, 0.5, float("nan"), RuntimeError("no such instruction")])
def test_a_device_streams_only_where_the_kernel_is_found_right(found, fp8, monkeypatch) -> None:
    check = pytest.importorskip("diptych.kernels.stream_check")

    def difference(device, rows, width, size) -> float:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(check, "_fp8_difference" if fp8 else "_difference", difference)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check.streams.cache_clear()
    assert check.streams(torch.device("cuda"), fp8) is (found == 1e-3)
    check.streams.cache_clear()
