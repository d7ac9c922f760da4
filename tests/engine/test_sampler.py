from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.engine.sampler import Sampler
from diptych.engine.sampling_rows import SamplingRows
from diptych.engine.step import NewRequest
from diptych.errors import InvalidRequestError
from diptych.kernels.sampling_tables import MAX_REMEMBERED
from diptych.kernels.torch_ops import TorchOps
from diptych.sampling_params import SamplingParams

CPU = torch.device("cpu")
EOS = 1


class Rows:
    """Requests at rows 0, 1, ..., each with its parameters, prompt and output so far."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = SamplingRows(64, vocab_size, CPU)
        self._sampler = Sampler(TorchOps(), self._rows)
        self._num_outputs: list[int] = []

    def add(self, prompt: list[int], output: list[int], **params) -> Rows:
        row = len(self._num_outputs)
        new = NewRequest(
            request_id=str(row),
            token_ids=prompt + output,
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(**{"seed": 0} | params),
            eos_token_ids=[EOS],
            block_ids=([],),
            num_computed_tokens=0,
        )
        self._rows.set(row, new)
        self._num_outputs.append(len(output))
        return self

    def sample(self, logits: Tensor) -> list[int]:
        """Sample every row; `logits` is one row for all, or one each, and stays as it is."""
        self._rows.flush()
        count, num_outputs = len(self._num_outputs), torch.tensor(self._num_outputs)
        self._num_outputs = [known + 1 for known in self._num_outputs]
        rows = torch.arange(count)
        return self._sampler.sample(logits.expand(count, -1), rows, num_outputs).tolist()


def draws(logits: Tensor, count: int, **params) -> Tensor:
    """Tokens of `count` requests that differ in their seed, as frequencies."""
    tokens: list[int] = []
    for start in range(0, count, 64):
        rows = Rows(len(logits))
        for seed in range(start, start + 64):
            rows.add([0], [], seed=seed, **params)
        tokens += rows.sample(logits)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 2.0, 0.0, 1.5, -4.0])


def test_greedy_takes_the_largest_logit() -> None:
    assert Rows(8).add([0], [], temperature=0.0).sample(LOGITS) == [1]


def test_seeded_draws_follow_the_softmax() -> None:
    count = 12800
    for temperature in (1.0, 0.5):
        want = torch.softmax(LOGITS / temperature, -1)
        have = draws(LOGITS, count, temperature=temperature)
        chi_square = float((count * (have - want) ** 2 / want).sum())
        assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


def test_the_same_seed_and_position_give_the_same_token() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))
    first = [Rows(200).add([0], [5] * i, seed=9).sample(logits) for i in range(20)]
    again = [Rows(200).add([3, 4], [7] * i, seed=9).sample(logits) for i in range(20)]
    assert first == again
    assert len({tokens[0] for tokens in first}) > 5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.5, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {3: 2.0}},
        {"temperature": 1.0, "top_k": 1500},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "min_tokens": 9},
    ]
    logits = torch.randn(len(kinds), 2000, generator=generator) * 2
    together = Rows(2000)
    for i, params in enumerate(kinds):
        together.add([i, 2], [4, i], seed=i, **params)
    alone = [
        Rows(2000).add([i, 2], [4, i], seed=i, **params).sample(logits[i])[0]
        for i, params in enumerate(kinds)
    ]
    assert together.sample(logits) == alone


def test_top_k_keeps_the_k_most_likely() -> None:
    assert draws(LOGITS, 640, top_k=3).nonzero().flatten().tolist() == [1, 2, 4]
    assert draws(LOGITS, 640, top_k=1)[1] == 1.0


def test_top_k_of_the_vocabulary_or_more_changes_nothing() -> None:
    assert torch.equal(draws(LOGITS, 640), draws(LOGITS, 640, top_k=8))
    assert torch.equal(draws(LOGITS, 640), draws(LOGITS, 640, top_k=9999))


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    # softmax: 1: .47, 2: .29, 4: .17, ...
    assert draws(LOGITS, 640, top_p=0.4)[1] == 1.0
    assert draws(LOGITS, 640, top_p=0.5).nonzero().flatten().tolist() == [1, 2]
    assert draws(LOGITS, 640, top_p=0.75).nonzero().flatten().tolist() == [1, 2, 4]


def test_top_p_applies_to_what_top_k_left() -> None:
    # of tokens 1 and 2 the first has .62
    assert draws(LOGITS, 640, top_k=2, top_p=0.6)[1] == 1.0
    assert draws(LOGITS, 640, top_k=2, top_p=0.65).nonzero().flatten().tolist() == [1, 2]


def test_min_p_is_relative_to_the_most_likely() -> None:
    # p / p_max: 1: 1, 2: .61, 4: .37, 6: .22
    assert draws(LOGITS, 640, min_p=0.3).nonzero().flatten().tolist() == [1, 2, 4]
    assert draws(LOGITS, 640, min_p=1.0)[1] == 1.0


def test_a_full_sort_and_a_partial_one_cut_alike() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    # 1024 is the largest partial sort
    for seed in range(20):
        at_limit, beyond = ({"top_k": 1024, "top_p": 0.3}, {"top_k": 1025, "top_p": 0.3})
        both = [Rows(3000).add([0], [], seed=seed, **p).sample(logits) for p in (at_limit, beyond)]
        assert both[0] == both[1]


@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
def test_top_p_over_a_large_vocabulary_is_that_of_a_full_sort(spread: float) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * spread
    for top_p in (0.1, 0.5, 0.9, 0.999):
        rows = Rows(5000)
        for seed in range(4):
            rows.add([0], [], seed=seed, top_p=top_p)
        values, ids = logits.double().softmax(-1).sort(descending=True)
        kept = values.cumsum(-1) - values < top_p
        masked = logits.clone().scatter_(1, ids, logits.gather(1, ids).where(kept, -torch.inf))
        plain = Rows(5000)
        for seed in range(4):
            plain.add([0], [], seed=seed)
        assert rows.sample(logits) == plain.sample(masked)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"repetition_penalty": 2.0}, [0.5, 1.5, 2.5, -2.0, 2.0, 0.0, 1.5, -4.0]),
        ({"frequency_penalty": 0.5}, [1.0, 2.0, 2.5, -1.5, 2.0, 0.0, 1.5, -4.0]),
        ({"presence_penalty": 0.5}, [1.0, 2.5, 2.5, -1.5, 2.0, 0.0, 1.5, -4.0]),
        ({"logit_bias": {1: -3.0, 7: 10.0}}, [1.0, 0.0, 2.5, -1.0, 2.0, 0.0, 1.5, 6.0]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_penalties_and_bias_change_these_logits(params: dict, expected: list[float]) -> None:
    """The prompt has token 0; the output 1, 1 and 3."""
    for seed in range(50):
        ours = Rows(8).add([0], [1, 1, 3], seed=seed, **params).sample(LOGITS)
        plain = Rows(8).add([0], [1, 1, 3], seed=seed).sample(torch.tensor(expected))
        assert ours == plain


def test_only_allowed_tokens_are_sampled() -> None:
    have = draws(LOGITS, 640, allowed_token_ids=[0, 7, 3])
    assert have.nonzero().flatten().tolist() == [0, 3, 7]


def test_a_bad_word_is_not_completed() -> None:
    bad = {"temperature": 0.0, "bad_words_token_ids": [[1], [4, 2]]}
    assert Rows(8).add([4], [], **bad).sample(LOGITS) == [2]  # [4] is prompt, not output
    assert Rows(8).add([4], [4], **bad).sample(LOGITS) == [4]
    assert Rows(8).add([4], [4, 5], **bad).sample(LOGITS) == [2]


@pytest.mark.parametrize("count", [127, 128, 129, 300])
def test_of_a_long_output_the_last_tokens_are_known_when_a_row_is_entered(count: int) -> None:
    output = list(range(count))
    last = output[-MAX_REMEMBERED:]
    logits = torch.zeros(400).scatter_(0, torch.tensor([398, 399]), torch.tensor([1.0, 2.0]))

    def sample(bad_word: list[int]) -> list[int]:
        bad = {"temperature": 0.0, "bad_words_token_ids": [bad_word]}
        return Rows(400).add([9], output, **bad).sample(logits)

    assert sample([*last, 399]) == [398]
    assert sample([399, *last[1:], 399]) == [399]


def test_as_much_is_changed_as_a_request_may_ask_for() -> None:
    words = [[3] * 128 + [token] for token in range(13, 21)]
    most = SamplingParams(
        temperature=0.0,
        bad_words_token_ids=words,
        logit_bias={token: float(token % 7) for token in range(10, 1023)},
        min_tokens=1,
        stop_token_ids=[1, 2],
    )
    most.check_logit_edits(1)
    rows = Rows(2000)
    params = {name: getattr(most, name) for name in most.__struct_fields__}
    rows.add([], [3] * 128, **params)
    assert rows.sample(torch.zeros(2000)) == [27]  # 13 and 20 would be as likely
    with pytest.raises(InvalidRequestError):
        most.check_logit_edits(2)


def test_no_stop_token_before_min_tokens() -> None:
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [2]}
    assert Rows(8).add([0], [], **params).sample(LOGITS) == [4]
    assert Rows(8).add([0], [4], **params).sample(LOGITS) == [4]
    assert Rows(8).add([0], [4, 4], **params).sample(LOGITS) == [EOS]


def test_a_row_that_is_left_leaves_nothing_behind() -> None:
    rows = Rows(8).add(
        [1, 4],
        [2],
        temperature=0.0,
        allowed_token_ids=[7, 3],
        logit_bias={7: 1.0},
        repetition_penalty=2.0,
        bad_words_token_ids=[[2, 7]],
    )
    assert rows.sample(LOGITS) == [3]
    rows._num_outputs.clear()
    assert rows.add([0], [], temperature=0.0).sample(LOGITS) == [1]
    rows._num_outputs.clear()
    again = {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.5}
    assert rows.add([0], [], **again).sample(LOGITS) == [1]
    assert rows.sample(LOGITS) == [2]
    rows._num_outputs.clear()
    assert rows.add([0], [], **again).sample(LOGITS) == [1]


def test_each_sample_counts_in_the_next_one() -> None:
    greedy = {"temperature": 0.0}
    rows = Rows(8).add([0], [], **greedy, frequency_penalty=0.6)
    rows.add([0], [], **greedy, presence_penalty=0.6).add([1], [], **greedy, repetition_penalty=1.5)
    rows.add([0], [], **greedy, bad_words_token_ids=[[1, 1], [2, 1]])
    rows.add([0], [], **greedy, min_tokens=2, stop_token_ids=[1, 2])
    drawn = [rows.sample(LOGITS) for _ in range(5)]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == [
        [1, 2, 1, 4, 2],
        [1, 2, 1, 1, 1],
        [2, 1, 1, 1, 1],
        [1, 2, 2, 2, 2],
        [4, 4, 1, 1, 1],
    ]


def test_what_was_sampled_before_a_row_is_entered_again_counts_there_too() -> None:
    kinds = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
        {"bad_words_token_ids": [[2, 3, 4], [5, 6]], "temperature": 1.5},
        {"presence_penalty": 0.7, "top_k": 5},
    ]
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    whole = Rows(40)
    for seed, params in enumerate(kinds):
        whole.add([1, 2], [], **params | {"seed": seed})
    drawn = [whole.sample(logits) for _ in range(9)]
    for count in (1, 4, 8):
        resumed = Rows(40)
        for seed, params in enumerate(kinds):
            known = [tokens[seed] for tokens in drawn[:count]]
            resumed.add([1, 2], known, **params | {"seed": seed})
        assert [resumed.sample(logits) for _ in range(9 - count)] == drawn[count:]
