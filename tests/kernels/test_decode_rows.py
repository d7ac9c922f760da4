"""Rows around a decode step, against torch."""

import pytest
import torch

from diptych.kernels import reference

decode_rows = pytest.importorskip("diptych.kernels.decode_rows")


def make_rows(count: int, device: torch.device) -> list[torch.Tensor]:
    """Last tokens, positions, prompt lengths."""
    columns = torch.randint(0, 200, (3, count)).unbind()
    return [column.to(device) for column in columns]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("width", [13, 300])
def test_reads_what_the_rows_hold(block_size: int, width: int, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens, _, prompts = make_rows(9, device)
    most = width * block_size - 1
    positions = torch.tensor([0, 15, 16, 63, 64, 65, 200, most - 1, most], device=device)
    # columns of a wider table
    tables = torch.randint(0, 9999, (9, width + 5), dtype=torch.int32, device=device)
    order = torch.tensor([8, 3, -1, 0, 7, 6, 2, -1], device=device)
    args = (order, tokens, positions, prompts, tables, block_size, width)
    ours, theirs = decode_rows.read_rows(*args), reference.read_rows(*args)
    for got, want in zip(ours[:-1], theirs[:-1], strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert ours.block_tables.shape == theirs.block_tables.shape
    for i, length in enumerate(theirs.seq_lens.tolist()):
        used = -(-length // block_size)
        assert torch.equal(ours.block_tables[i, :used], theirs.block_tables[i, :used])
    assert ours.slots[2] == -1
    assert ours.seq_lens[2] == 0


@pytest.mark.parametrize("count", [1, 5, 128, 200])
def test_moves_on_the_rows_of_the_step_alone(count: int, device: torch.device) -> None:
    torch.manual_seed(count)
    tokens, positions, _ = make_rows(300, device)
    order = torch.randperm(300)[:count].to(device)
    order[count // 2 + 1 :] = -1
    sampled = torch.randint(0, 999, (count,), device=device)
    want = (tokens.clone(), positions.clone(), torch.full_like(sampled, -7))
    got = (tokens, positions, want[2].clone())
    decode_rows.advance_rows(order, sampled, *got)
    reference.advance_rows(order, sampled, *want)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(got[2], sampled)


@pytest.mark.parametrize("count", [1, 3, 200])
def test_writes_rows_and_keeps_the_tokens_that_the_device_alone_knows(
    count: int, device: torch.device
) -> None:
    torch.manual_seed(count)
    state = make_rows(256, device)
    rows = torch.randperm(256)[:count].to(device)
    new = make_rows(count, device)
    new[0][::2] = -1
    want = [column.clone() for column in state]
    kept = state[0][rows[::2]].clone()
    decode_rows.write_rows(rows, *new, *state)
    reference.write_rows(rows, *new, *want)
    for ours, theirs in zip(state, want, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(state[0][rows[::2]], kept)
