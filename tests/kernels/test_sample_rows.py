"""Sampling by tables, against its twin in torch, whatever the rows ask for."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diptych.kernels import reference
from diptych.kernels import sampling_tables as tables
from diptych.kernels.sampling_tables import SamplingTables, make_tables

kernel = pytest.importorskip("diptych.kernels.sample_rows")


def set_row(
    state: SamplingTables,
    row: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> None:
    log_min_p = math.log(min_p) if min_p else -math.inf
    floats = [temperature, top_p, log_min_p, 0.0, 0.0, 1.0]
    limited = bool(temperature and (top_k or top_p < 1.0 or min_p))
    state.floats[row] = torch.tensor(floats, device=state.floats.device)
    ints = [seed, top_k, tables.LIMITED * limited, 0]
    state.ints[row] = torch.tensor(ints, device=state.ints.device)


def penalise(state: SamplingTables, row: int, presence: float, frequency: float, repetition: float):
    state.floats[row, tables.PRESENCE] = presence
    state.floats[row, tables.FREQUENCY] = frequency
    state.floats[row, tables.REPETITION] = repetition
    state.ints[row, tables.FLAGS] += tables.PENALISED
    vocab = state.counts.shape[1]
    state.counts[row, :: max(vocab // 7, 1)] = 3
    state.counts[row, :: max(vocab // 5, 1)] += tables.IN_PROMPT


def edit(state: SamplingTables, row: int, edits: list[tuple[int, float, int, list[int]]]) -> None:
    """(token, bias, before which output token, after which prefix)."""
    start = 0
    for e, (token, bias, until, prefix) in enumerate(sorted(edits)):
        bits = int(torch.tensor([bias]).view(torch.int32))
        packed = torch.tensor([token, bits, until, start * 256 + len(prefix)])
        state.edits[row, :, e] = packed.int()
        state.prefixes[row, start : start + len(prefix)] = torch.tensor(prefix).int()
        start += len(prefix)
    state.ints[row, tables.NUM_EDITS] = len(edits)
    state.ints[row, tables.FLAGS] += tables.EDITED + tables.REMEMBERED


def clone(state: SamplingTables) -> SamplingTables:
    return SamplingTables(*(getattr(state, f.name).clone() for f in fields(state)))


def both(logits: Tensor, state: SamplingTables, rows: Tensor, positions: Tensor) -> Tensor:
    """What both sample; they leave the same tables."""
    ours, theirs, before = clone(state), clone(state), logits.clone()
    found = kernel.sample_rows(logits, rows, positions, ours)
    assert torch.equal(found, reference.sample_rows(logits, rows, positions, theirs))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    for field in fields(state):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name))
    return found


def least_of(x: Tensor, state: SamplingTables) -> Tensor:
    """The kernel's thresholds of rows 0, 1, ..., all limited."""
    count, vocab = x.shape
    blocks = -(-vocab // kernel.BLOCK)
    padded = torch.full((count, blocks * kernel.BLOCK), -torch.inf, device=x.device)
    padded[:, :vocab] = x
    padded = padded.view(count, blocks, -1)
    wide = torch.full((count, vocab + kernel.ROOM), torch.nan, device=x.device)
    wide[:, :vocab] = x
    return kernel._find_thresholds(
        wide,
        torch.arange(count, device=x.device),
        state,
        padded.amax(-1),
        padded.masked_fill(padded == -torch.inf, torch.inf).amin(-1),
        torch.zeros(count, dtype=torch.int32, device=x.device),
        vocab,
    )


def expected_least(x: Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """By a full sort in double; of one row."""
    values = x[x > -torch.inf].double().sort(descending=True).values
    weights = (values - values[0]).exp()
    if min_p:
        floor = (x.amax() + torch.tensor(math.log(min_p))).double()
        weights = weights[values >= floor]
    if top_k:
        weights = weights[:top_k]
    if top_p < 1.0:
        weights = weights[(weights.cumsum(0) - weights) < top_p * weights.sum()]
    return float(values[len(weights) - 1])


KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3, "seed": 2**62},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_p": 0.5, "seed": -1},
    {"top_p": 1e-6},
    {"top_p": 0.97, "top_k": 40},
    {"min_p": 0.2, "top_k": 3},
    {"min_p": 0.05},
]


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (1, torch.float32),
        (7, torch.bfloat16),
        (384, torch.float32),
        (2049, torch.float32),
        (9000, torch.bfloat16),
    ],
)
def test_agrees_with_torch_in_a_mixed_and_padded_batch(vocab, dtype, device) -> None:
    torch.manual_seed(vocab)
    state = make_tables(16, vocab, device)
    order = torch.tensor([3, 0, -1, 9, 7, 1, 5, 4, 2, 8, 6, -1], device=device)
    for row, kind in enumerate(KINDS):
        set_row(state, row, **kind)
        if row % 3 == 0:
            penalise(state, row, 0.5, 0.25, 1.25)
        if row % 2 == 0:
            state.ints[row, tables.FLAGS] += tables.ALLOWED
            state.allowed[row] = -1 - 2**row
        if row % 4 == 1:
            edit(state, row, [(vocab - 1, 9.0, tables.FOREVER, []), (0, -math.inf, 5, [])])
    logits = (torch.randn(12, vocab, device=device) * 4).to(dtype)
    positions = torch.arange(12, device=device) * 3
    found = both(logits, state, order, positions)
    assert found[2] == found[11] == 0


def test_draws_are_the_same_in_every_batch(device) -> None:
    vocab = 5000
    state = make_tables(len(KINDS), vocab, device)
    for row, kind in enumerate(KINDS):
        set_row(state, row, **kind)
    logits = torch.randn(len(KINDS), vocab, device=device) * 3
    rows = torch.arange(len(KINDS), device=device)
    together = kernel.sample_rows(logits, rows, rows * 5, state)
    for i in range(len(KINDS)):
        alone = kernel.sample_rows(logits[i : i + 1], rows[i : i + 1], rows[i : i + 1] * 5, state)
        assert alone[0] == together[i]


def test_without_limits_a_row_samples_the_same(device) -> None:
    state = make_tables(2, 3000, device)
    set_row(state, 0, seed=4)
    set_row(state, 1, temperature=0.0)
    logits, rows = torch.randn(2, 3000, device=device), torch.arange(2, device=device)
    plain = kernel.sample_rows(logits, rows, rows, state, limits=False)
    assert torch.equal(plain, kernel.sample_rows(logits, rows, rows, state))


def test_of_equal_maxima_the_first_wins_and_masked_tokens_never(device) -> None:
    state = make_tables(2, 5000, device)
    set_row(state, 1, top_p=0.9)
    logits = torch.full((2, 5000), -torch.inf, device=device)
    logits[:, [3000, 4100]] = 2.0
    rows = torch.arange(2, device=device)
    for position in range(6):
        found = both(logits, state, rows, rows + position).tolist()
        assert found[0] == 3000
        assert found[1] in (3000, 4100)


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_nan_and_infinite_logits(kind, device) -> None:
    state = make_tables(5, 70, device)
    for row in range(5):
        set_row(state, row, **kind)
    logits = torch.randn(5, 70, device=device)
    logits[0, 5:] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 9] = torch.inf
    logits[4, :69] = -torch.inf
    found = both(logits, state, torch.arange(5, device=device), torch.arange(5, device=device))
    assert found[0] < 5
    assert found[1:].tolist() == [0, 0, 9, 69]


def test_no_rows_give_no_tokens(device) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    logits = torch.zeros(0, 9, device=device)
    assert kernel.sample_rows(logits, empty, empty, make_tables(1, 9, device)).shape == (0,)


def test_a_penalised_row_counts_what_it_samples(device) -> None:
    state = make_tables(2, 50, device)
    for row in range(2):
        set_row(state, row, temperature=0.0)
    penalise(state, 1, 0.0, 100.0, 1.0)
    state.counts.zero_()
    logits = torch.arange(50.0, device=device).expand(2, 50)
    rows, position = torch.tensor([1, 0], device=device), torch.zeros(2, device=device).long()
    drawn = [kernel.sample_rows(logits, rows, position + i, state).tolist() for i in range(3)]
    assert drawn == [[49, 49], [48, 49], [47, 49]]
    assert state.counts[1, 47:].tolist() == [1, 1, 1]
    assert not state.counts[0].any()


def test_an_edit_applies_until_its_token_and_after_its_prefix(device) -> None:
    state = make_tables(1, 20, device)
    set_row(state, 0, temperature=0.0)
    never, forever = -math.inf, tables.FOREVER
    edit(
        state,
        0,
        [
            (19, never, 2, []),  # not among the first two
            (18, never, forever, [18]),  # not twice in a row
            (17, never, forever, [18, 17, 19]),
            (3, 2.5, forever, []),
        ],
    )
    logits = torch.arange(20.0, device=device)[None]
    row = torch.zeros(1, dtype=torch.int64, device=device)
    drawn = []
    for position in range(4):
        state.recent[0, 5:] = 18  # what lies past the output does not count
        drawn += both(logits, state, row, row + position).tolist()
        kernel.sample_rows(logits, row, row + position, state)
    assert drawn == [18, 17, 19, 19]
    logits = logits.masked_fill(torch.arange(20, device=device) == 19, -torch.inf)
    # after 18, 17, 19 neither 18 is banned nor 17 allowed
    assert both(logits, state, row, row + 3).tolist() == [18]
    logits[0, 18] = -1.0
    assert both(logits, state, row, row + 3).tolist() == [16]
    assert both(logits, state, row, row + 4).tolist() == [17]
    logits[0, 3] = 16.0
    assert both(logits, state, row, row + 4).tolist() == [3]


def test_the_oldest_of_many_output_tokens_is_forgotten(device) -> None:
    state = make_tables(1, 300, device)
    state = replace(state, recent=state.recent[:, :8].contiguous())
    set_row(state, 0, temperature=0.0)
    prefix = list(range(8))
    edit(state, 0, [(299, -math.inf, tables.FOREVER, prefix)])
    row = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.full((1, 300), -1.0, device=device)
    for position in range(2 * len(prefix)):
        wanted = logits.clone()
        wanted[0, position % len(prefix)] = 5.0
        kernel.sample_rows(wanted, row, row + position, state)
    logits[0, 299] = 1.0
    assert both(logits, state, row, row + 2 * len(prefix)).item() == 0
    assert both(logits, state, row, row + 2 * len(prefix) + 1).item() == 299


SHAPES = {
    "normal": lambda n: torch.randn(n),
    "peaked": lambda n: torch.randn(n) * 6,
    "flat": lambda n: torch.randn(n) * 0.01,
    "tied": lambda n: torch.randint(-3, 4, (n,)).float(),
    "coarse": lambda n: (torch.randn(n) * 2).bfloat16().float(),
    "equal": lambda n: torch.full((n,), 1.5),
    "outlier": lambda n: torch.cat((torch.tensor([60.0]), torch.randn(n)))[:n],
    "masked": lambda n: torch.randn(n).masked_fill(torch.rand(n) < 0.7, -torch.inf),
    "zeros": lambda n: torch.tensor([0.0, -0.0, -1.0]).repeat(n)[:n],
}


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    vocab=st.integers(1, 5000),
    top_k=st.one_of(st.just(0), st.just(1), st.integers(1, 60), st.integers(1, 6000)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-7, 1.0, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    seed=st.integers(0, 2**31),
)
def test_thresholds_are_those_of_a_sort(shape, vocab, top_k, top_p, min_p, seed, device) -> None:
    top_p = float(torch.tensor(top_p))
    assume(top_k or top_p < 1.0 or min_p)
    torch.manual_seed(seed)
    x = SHAPES[shape](vocab)
    if not bool((x > -torch.inf).any()):
        x[0] = 1.0
    state = make_tables(2, vocab, device)
    for row in range(2):
        set_row(state, row, top_k=top_k, top_p=top_p, min_p=min_p)
    least = least_of(torch.stack((x, x * 0.5)).to(device), state).cpu()
    for row, values in enumerate((x, x * 0.5)):
        floor = values.amax() + (math.log(min_p) if min_p else -math.inf)
        kept = values >= max(float(least[row]), float(floor), -3e38)
        wanted = values >= expected_least(values, top_k, top_p, min_p)
        differ = values[kept != wanted]
        if len(differ):
            # a sum within rounding of top_p: then it is about one value, and the next one
            assert top_p < 1.0
            assert differ.unique().numel() == 1
            weights = (values.double() - values.max()).exp().where(values >= floor, 0.0)
            if 0 < top_k < vocab:
                weights = weights.topk(top_k).values
            beyond = (values > differ[0]).double() * (values.double() - values.max()).exp()
            share = float(beyond.sum() / weights.sum())
            assert share == pytest.approx(top_p, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ({"top_k": 2}, 2.0),
        ({"top_k": 4}, 2.0),
        ({"top_k": 5}, 1.0),
        # of the three that tie two have a place: 0.6 of 1 + 2 / e is more than 1
        ({"top_k": 3, "top_p": 0.6}, 2.0),
        ({"top_k": 3, "top_p": 0.55}, 3.0),
        ({"top_k": 2, "top_p": 0.7}, 3.0),
        ({"top_p": 0.4}, 3.0),
        ({"top_p": 0.5}, 2.0),
        ({"top_p": 0.93}, 2.0),
        ({"top_p": 0.95}, 1.0),
        ({"min_p": 0.37}, 3.0),
        ({"min_p": 0.36}, 2.0),
        # 1 of 1 + 3 / e
        ({"min_p": 0.36, "top_p": 0.47}, 3.0),
        ({"min_p": 0.36, "top_p": 0.48}, 2.0),
    ],
)
def test_thresholds_of_a_row_that_ties(kind, least, device) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 2.0, 2.0, -torch.inf]], device=device)
    state = make_tables(1, 6, device)
    set_row(state, 0, **kind)
    for shift in (0.0, 7.25, -100.0):
        kept = x + shift >= least_of(x + shift, state)
        assert torch.equal(kept, x >= least)


@pytest.mark.parametrize("kind", [{"top_k": 2500}, {"top_p": 0.6}, {"top_k": 3000, "top_p": 0.5}])
@pytest.mark.parametrize("shape", ["equal", "tied", "normal"])
def test_a_bracket_that_is_too_full_is_searched_in_the_whole_row(
    kind, shape, device, monkeypatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "ROOM", 16)
    x = SHAPES[shape](5000)
    state = make_tables(1, 5000, device)
    set_row(state, 0, **kind)
    least = least_of(x[None].to(device), state)
    wanted = expected_least(x, kind.get("top_k", 0), kind.get("top_p", 1.0), 0.0)
    assert float(least[0]) == wanted


def test_many_rows_are_sampled_in_groups(device, monkeypatch) -> None:
    state = make_tables(7, 50, device)
    for row in range(7):
        set_row(state, row, seed=row, top_k=5)
    logits, rows = torch.randn(7, 50, device=device), torch.arange(7, device=device)
    whole = kernel.sample_rows(logits, rows, rows, state)
    monkeypatch.setattr(kernel, "GROUP", 4)
    assert torch.equal(kernel.sample_rows(logits, rows, rows, state), whole)


def test_a_count_stays_at_its_largest(device) -> None:
    state = make_tables(1, 4, device)
    set_row(state, 0, temperature=0.0)
    state.ints[0, tables.FLAGS] = tables.PENALISED
    state.counts[0, 3] = tables.IN_PROMPT + tables.MAX_COUNT - 1
    logits, row = torch.arange(4.0, device=device)[None], torch.zeros(1).long().to(device)
    for _ in range(2):
        assert both(logits, state, row, row).item() == 3
        kernel.sample_rows(logits, row, row, state)
        assert state.counts[0].tolist() == [0, 0, 0, -1]
