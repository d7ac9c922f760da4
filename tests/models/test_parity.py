"""Our decoder against transformers, on tiny random checkpoints of every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore, make_engine_core
from diptych.engine.request import EngineCoreRequest
from diptych.models.fetch import resolve_model
from diptych.sampling_params import SamplingParams
from tests.tiny_models import ARCHITECTURES, make_tiny_model

OUTPUT = 16


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", request.param)


@pytest.fixture(scope="module")
def theirs(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    # 77 tokens reach past the sliding window and over block ends
    lengths = (1, 5, 16, 33, 77)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in lengths]


def make_core(model: Path, **settings) -> EngineCore:
    defaults = {"model": str(model), "device": "cpu", "num_kv_blocks": 128}
    return make_engine_core(EngineConfig(**defaults | settings))


def greedy(
    core: EngineCore, prompts: list[list[int]], first_id: int = 0, output: int = OUTPUT
) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    outputs: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts, first_id):
        outputs[str(i)] = []
        core.add_request(
            EngineCoreRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params)
        )
    while core.has_work:
        step = core.step()
        tokens = iter(step.token_ids if step else [])
        for name, count in zip(step.request_ids, step.token_counts, strict=True) if step else ():
            outputs[name] += [next(tokens) for _ in range(count)]
    return list(outputs.values())


def expected(theirs: PreTrainedModel, prompt: list[int], output: int = OUTPUT) -> list[int]:
    ids = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=output,
        do_sample=False,
        eos_token_id=None,
    )
    return ids[0, len(prompt) :].tolist()


@pytest.fixture
def answers(theirs: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [expected(theirs, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 64, "num_kv_blocks": 32},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 20},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 7, "max_num_seqs": 2},
    ],
    ids=["mixed", "block64", "uncached", "chunked", "chunked7"],
)
def test_a_batch_gives_the_tokens_of_transformers(
    model: Path, prompts: list[list[int]], answers: list[list[int]], settings: dict
) -> None:
    assert greedy(make_core(model, max_model_len=512, **settings), prompts) == answers


def test_preempted_requests_give_the_same_tokens(
    model: Path, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    # the prompts fill 11 blocks, their outputs take 5 more
    settings = {"num_kv_blocks": 13, "enable_prefix_caching": False, "reserve_output": False}
    core = make_core(model, max_model_len=128, **settings)
    assert greedy(core, prompts) == answers
    assert core.stats.num_preemptions > 0


def test_prefix_hits_give_the_same_tokens(
    model: Path, theirs: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    core = make_core(model, max_model_len=512)
    assert greedy(core, prompts) == answers
    assert greedy(core, prompts, first_id=10) == answers
    branch = prompts[-1][:50] + prompts[1]
    assert greedy(core, [branch], first_id=20) == [expected(theirs, branch)]
    # 32 of 33, 64 of 77 and 48 of 50 tokens lie in full blocks
    assert core.stats.prompt_tokens_local_cache_hit >= 32 + 64 + 48


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"attention_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 48},
    ],
    ids=["linear", "llama3", "bias", "tied"],
)
def test_what_a_llama_may_vary_in_gives_the_tokens_of_transformers(
    tmp_path: Path, prompts: list[list[int]], overrides: dict
) -> None:
    model = make_tiny_model(tmp_path / "m", **overrides)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    core = make_core(model, max_model_len=512)
    assert greedy(core, prompts) == [expected(theirs, prompt) for prompt in prompts]


@pytest.mark.slow
def test_smollm2_gives_the_first_32_tokens_of_transformers() -> None:
    directory = resolve_model("smollm2")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = ["What is the capital of France?", "def fibonacci(n):\n", "Once upon a time"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    core = make_core(directory, max_model_len=512)
    assert greedy(core, prompts, output=32) == [expected(theirs, p, output=32) for p in prompts]
