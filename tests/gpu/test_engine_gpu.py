"""The engine on a GPU gives the tokens that it gives on a CPU."""

import os
import random

import pytest
import torch

from diptych import LLM, SamplingParams
from tests.tiny_models import ARCHITECTURES, make_tiny_model

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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 64},
        {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8},
        {"block_size": 16, "num_kv_blocks": 24, "enable_prefix_caching": False},
    ],
    ids=["whole-prompts", "chunked", "preempted"],
)
def test_float32_gives_the_tokens_of_the_cpu(architecture, settings, tmp_path) -> None:
    model = str(make_tiny_model(tmp_path / architecture, architecture))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=1)
    for sampling in (greedy, seeded):
        expected, expected_logprobs = answers(model, sampling, device="cpu")
        for backend in ("triton", "torch"):
            tokens, logprobs = answers(
                model,
                sampling,
                device="cuda",
                dtype="float32",
                attention_backend=backend,
                **settings,
            )
            assert tokens == expected
            for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_agrees_with_float32_at_first(architecture, dtype, tmp_path) -> None:
    model = str(make_tiny_model(tmp_path / architecture, architecture))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    _, expected = answers(model, sampling, device="cuda", dtype="float32")
    _, logprobs = answers(model, sampling, device="cuda", dtype=dtype)
    for ours, theirs in zip(logprobs, expected, strict=True):
        assert len(ours) == 8
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.skipif(
    "DIPTYCH_TEST_MODEL" not in os.environ, reason="DIPTYCH_TEST_MODEL names no SmolLM2 directory"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model_knows_the_capital_of_france(dtype) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(os.environ["DIPTYCH_TEST_MODEL"], device="cuda", dtype=dtype) as llm:
        (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in answer.outputs[0].text
    assert torch.cuda.is_available()
