"""The engine on a GPU gives the tokens that it gives on a CPU."""

import math
import os
import random

import pytest

from diptych import LLM, SamplingParams
from tests.tiny_models import ARCHITECTURES, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=1)
LENGTHS = (1, 15, 16, 17, 40, 64, 65, 100)


def prompts(vocab_size: int) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    drawn = [rng.choices(range(10, vocab_size), k=length) for length in LENGTHS]
    # the last shares a prefix of whole blocks with the one before it
    drawn.append(drawn[-1][:96] + rng.choices(range(10, vocab_size), k=9))
    return [{"prompt_token_ids": ids} for ids in drawn]


def answers(model: str, sampling: SamplingParams, **arguments):
    """Tokens and the logprobs of the chosen ones, per prompt."""
    # a small share of the memory, so that several of these run at once
    with LLM(model, max_model_len=256, gpu_memory_utilization=0.05, **arguments) as llm:
        outputs = llm.generate(prompts(llm.model_config.vocab_size), sampling, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    logprobs = [
        [position[token].logprob for token, position in zip(o.token_ids, o.logprobs, strict=True)]
        for o in found
    ]
    return [list(o.token_ids) for o in found], logprobs


@pytest.fixture(scope="module", params=ARCHITECTURES)
def on_the_cpu(request, tmp_path_factory):
    """A model, and what the CPU answers: per sampling, tokens and logprobs."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("model"), request.param))
    return model, [answers(model, sampling, device="cpu") for sampling in (GREEDY, SEEDED)]


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 64},
        {"block_size": 64, "attention_backend": "torch"},
        {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8},
        {
            "block_size": 16,
            "num_kv_blocks": 24,
            "enable_prefix_caching": False,
            "reserve_output": False,
        },
    ],
    ids=["whole-prompts", "torch", "chunked", "preempted"],
)
def test_float32_gives_the_tokens_of_the_cpu(on_the_cpu, settings) -> None:
    model, expected = on_the_cpu
    for sampling, (tokens, logprobs) in zip((GREEDY, SEEDED), expected, strict=True):
        ours, our_logprobs = answers(model, sampling, device="cuda", dtype="float32", **settings)
        assert ours == tokens
        for got, want in zip(our_logprobs, logprobs, strict=True):
            assert got == pytest.approx(want, abs=1e-4)


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Root mean square over the prompts of the first token's logprob."""
    squares = [(a[0] - b[0]) ** 2 for a, b in zip(ours, theirs, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_is_as_close_to_float32_as_plain_torch_is(
    architecture, dtype, tmp_path
) -> None:
    model = str(make_tiny_model(tmp_path / architecture, architecture))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    def logprobs(dtype: str, backend: str) -> list[list[float]]:
        return answers(model, sampling, device="cuda", dtype=dtype, attention_backend=backend)[1]

    exact = logprobs("float32", "torch")
    twin, ours = logprobs(dtype, "torch"), logprobs(dtype, "triton")

    assert all(len(found) == 8 for found in ours)
    assert distance(ours, exact) <= 2 * distance(twin, exact) + 0.01


@pytest.mark.skipif(
    "DIPTYCH_TEST_MODEL" not in os.environ, reason="DIPTYCH_TEST_MODEL names no SmolLM2 directory"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_knows_the_capital_of_france(dtype) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(os.environ["DIPTYCH_TEST_MODEL"], device="cuda", dtype=dtype) as llm:
        (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in answer.outputs[0].text
