"""The engine through the Triton ops gives the tokens that it gives through torch."""

import pytest
import torch

from diptych import LLM, SamplingParams
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has more of this")
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_greedy_tokens_are_equal(architecture, tmp_path) -> None:
    model = str(make_tiny_model(tmp_path, architecture, num_hidden_layers=1))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(20, 20 + length))} for length in (3, 30)]

    def tokens(backend: str) -> list[list[int]]:
        with LLM(model, max_model_len=64, device="cpu", attention_backend=backend) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens("triton") == tokens("torch")
