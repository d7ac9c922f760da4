import random
from pathlib import Path
from typing import Any

import pytest

from diptych.errors import ContextLengthError, InvalidRequestError
from diptych.models.config import ModelConfig
from diptych.sampling_params import SamplingParams
from diptych.text.chat_template import ChatTemplate
from diptych.text.processor import Processor
from diptych.text.tokenizer import Tokenizer
from tests.tiny_models import make_tiny_model

MAX_LEN = 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def make_processor(directory: Path, **kwargs: Any) -> Processor:
    return Processor(
        ModelConfig.from_directory(directory),
        Tokenizer.from_directory(directory),
        ChatTemplate.from_directory(directory),
        **{"max_model_len": MAX_LEN, "rng": random.Random(0), **kwargs},
    )


def test_a_request_leaves_complete(directory: Path) -> None:
    processor = make_processor(directory)
    request = processor.completion("the capital", SamplingParams(bad_words=["the"]))
    assert request.prompt_token_ids == processor.tokenizer.encode("the capital")
    assert request.sampling_params.max_tokens == 16
    assert request.sampling_params.seed is not None
    assert request.sampling_params.bad_words_token_ids
    assert request.eos_token_ids == [processor.tokenizer.eos_token_id]
    engine_request = request.to_engine("r", priority=3)
    assert (engine_request.request_id, engine_request.priority) == ("r", 3)


def test_text_and_its_ids_are_the_same_request(directory: Path) -> None:
    processor = make_processor(directory)
    params = SamplingParams(seed=1)
    text = processor.completion("the capital", params)
    ids = processor.completion(text.prompt_token_ids, params)
    assert (ids.prompt_token_ids, ids.sampling_params) == (
        text.prompt_token_ids,
        text.sampling_params,
    )


def test_a_chat_goes_through_the_template(directory: Path) -> None:
    processor = make_processor(directory, max_model_len=100)
    request = processor.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=None))
    assert request.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert processor.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == (
        request.prompt
    )
    assert request.sampling_params.max_tokens == 100 - len(request.prompt_token_ids)


def test_a_given_seed_stays_and_drawn_ones_follow_the_generator(directory: Path) -> None:
    def seeds(rng: random.Random) -> list[int | None]:
        processor = make_processor(directory, rng=rng)
        return [processor.completion("a", SamplingParams()).sampling_params.seed for _ in range(2)]

    given = make_processor(directory).completion("a", SamplingParams(seed=7))
    assert given.sampling_params.seed == 7
    assert seeds(random.Random(5)) == seeds(random.Random(5)) != seeds(random.Random(6))


def test_the_callers_params_are_left_as_they_were(directory: Path) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["the"])
    make_processor(directory).completion("a", params)
    assert (params.seed, params.max_tokens, params.bad_words_token_ids) == (None, None, None)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "must not be empty"),
        ([], {}, "must not be empty"),
        ([1, 384], {}, "token id 384 is outside the vocabulary of 384"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1, "a"], {}, "a text or a list of integers"),
        ([True], {}, "a text or a list of integers"),
        ("a", {"stop_token_ids": [384]}, "stop_token_ids contains 384"),
        ("a", {"allowed_token_ids": [999]}, "allowed_token_ids contains 999"),
        ("a", {"logit_bias": {999: 1.0}}, "logit_bias contains 999"),
        ("a", {"bad_words_token_ids": [[5, 384]]}, "bad_words_token_ids contains 384"),
        ("a", {"bad_words_token_ids": [[-1]]}, "bad_words_token_ids contains -1"),
        ("a", {"logprobs": 21}, "logprobs must be at most 20"),
        ("a", {"prompt_logprobs": -1}, "prompt_logprobs must be at most 20"),
        ("a", {"bad_words": [" "]}, "bad_words has no tokens"),
        ("a", {"bad_words_token_ids": [[5] * 130]}, "a word of 130 tokens"),
        ("a", {"bad_words_token_ids": [[5] * 129] * 9}, "1152 tokens before last ones"),
        ("a", {"bad_words_token_ids": [[5]] * 1025}, "have 1025 tokens or words together"),
    ],
)
def test_bad_input_is_named(
    directory: Path, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_processor(directory).completion(prompt, SamplingParams(**params))


def test_a_prompt_without_room_for_a_token_is_refused_with_numbers(directory: Path) -> None:
    processor = make_processor(directory)
    processor.completion([5] * (MAX_LEN - 1), SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthError, match=r"length is 32 tokens.*at least 33 tokens"):
        processor.completion([5] * MAX_LEN, SamplingParams(max_tokens=1))


def test_max_tokens_past_the_context_is_refused_or_cut(directory: Path) -> None:
    params = SamplingParams(max_tokens=30)
    with pytest.raises(ContextLengthError, match=r"requested 33 tokens \(3 in the prompt, 30"):
        make_processor(directory).completion([5, 5, 5], params)
    cut = make_processor(directory, clamp_max_tokens=True).completion([5, 5, 5], params)
    assert cut.sampling_params.max_tokens == 29


def test_less_room_than_min_tokens_is_refused(directory: Path) -> None:
    processor = make_processor(directory, max_model_len=10, clamp_max_tokens=True)
    params = SamplingParams(max_tokens=50, min_tokens=5)
    assert processor.completion([5] * 5, params).sampling_params.max_tokens == 5
    with pytest.raises(InvalidRequestError, match="min_tokens must be at most max_tokens"):
        processor.completion([5] * 6, params)


def test_bad_words_are_found_with_and_without_a_space(directory: Path) -> None:
    processor = make_processor(directory)
    bare, spaced = (
        processor.tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the")
    )
    assert len(bare) == len(spaced) == 1
    request = processor.completion("a", SamplingParams(bad_words=["the"]))
    assert request.sampling_params.bad_words_token_ids == [bare, spaced]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"top_p": float("nan")}, "top_p must be a finite number"),
        ({"stop": 5}, "stop must be a list of non-empty strings"),
        ({"stop": [b"x"]}, "stop must be a list of non-empty strings"),
        ({"bad_words": "abc"}, "bad_words must be a list of non-empty strings"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers"),
        ({"stop_token_ids": ["a", 1]}, "stop_token_ids must be a list of integers"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids must be a list of integers"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of integers"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids must be a list of integers"),
        ({"bad_words_token_ids": 5}, "bad_words_token_ids must be a list of lists of integers"),
        ({"bad_words_token_ids": [["a"]]}, "must be a list of non-empty lists of integers"),
        ({"bad_words_token_ids": [[]]}, "must be a list of non-empty lists of integers"),
        ({"logit_bias": [1]}, "logit_bias must be a map of id to number"),
        ({"logit_bias": {0: 10**400}}, "logit_bias must be a map of id to number"),
    ],
    ids=str,
)
def test_params_of_odd_types_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)
