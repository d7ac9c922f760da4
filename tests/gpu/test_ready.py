"""Once an engine is ready nothing is compiled, whatever comes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from diptych import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.0, "frequency_penalty": 0.5, "prompt_logprobs": 2},
]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Kernels that were compiled, or read from the disk's cache, since it was emptied."""
    found: list[str] = []

    def note(*, repr: str, **_: Any) -> None:
        found.append(repr)

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    yield found
    triton.knobs.runtime.jit_cache_hook = before


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_nothing_is_compiled_while_serving(tmp_path: Path, compiled, settings, architecture):
    config = CONFIG | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    limits = {"max_num_seqs": 96, "max_num_batched_tokens": 3000, "gpu_memory_utilization": 0.1}
    with LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        load_format="dummy",
        device="cuda",
        **limits | settings,
    ) as llm:
        compiled.clear()
        for count in (1, 2, 3, 7, 16, 33, 96, 120):
            prompts = [
                {"prompt_token_ids": rng.choices(range(32000), k=rng.choice((1, 2, 15, 64, 333)))}
                for _ in range(count)
            ]
            prompts[0] = {"prompt_token_ids": rng.choices(range(32000), k=rng.choice((900, 4097)))}
            params = [
                SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True, **KINDS[i % 4])
                for i in range(count)
            ]
            llm.generate(prompts, params, use_tqdm=False)
    assert compiled == []
