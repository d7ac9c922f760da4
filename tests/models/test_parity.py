"""Our decoder against transformers, on tiny random checkpoints of every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore, make_engine_core
from diptych.engine.request import EngineCoreRequest
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


def greedy(core: EngineCore, prompts: list[list[int]], first_id: int = 0) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
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


def expected(theirs: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
    )
    return ids[0, len(prompt) :].tolist()


def test_a_mixed_batch_gives_the_tokens_of_transformers(
    model: Path, theirs: PreTrainedModel, prompts: list[list[int]]
) -> None:
    core = make_core(model, max_model_len=512)
    assert greedy(core, prompts) == [expected(theirs, prompt) for prompt in prompts]
