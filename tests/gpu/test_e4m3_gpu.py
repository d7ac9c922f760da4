"""The device's own conversion of e4m3, alone and in attention."""

import pytest
import torch

pytest.importorskip("triton")

from diptych.kernels import reference, tiles
from diptych.kernels.paged_decode_attention import PagedDecode

DEVICE = torch.device("cuda")


def test_every_code_of_e4m3_is_converted_as_torch_does() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no such instruction")
    assert tiles.converts_e4m3(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_over_e4m3_is_the_reference(dtype, block_size) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 700, 0, 64, 2000], dtype=torch.int32, device=DEVICE)
    width = 2000 // block_size + 1
    kv = torch.randn(5 * width, 2, 2, block_size, 128, device=DEVICE).to(torch.float8_e4m3fn)
    tables = torch.randperm(5 * width, device=DEVICE).int().view(5, width)
    q = torch.randn(5, 8, 128, device=DEVICE).to(dtype)
    args = (q, kv[:, :, 0], kv[:, :, 1], tables, lengths, 0.1, 0, 2000, 0.5, 2.0)
    ours, theirs = PagedDecode()(*args), reference.paged_decode_attention(*args)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
