"""An engine stays in its share of the memory, whatever is asked of it, or refuses to start.

torch may take little more than the share here: an allocation beyond it fails as on a full GPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych import LLM, SamplingParams
from diptych.errors import ConfigError, ModelLoadError

SHARE = 0.05
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.01},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 400, "logprobs": 20},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.3, "min_tokens": 5},
    {"temperature": 1.0, "logit_bias": {5: 2.0}, "allowed_token_ids": list(range(2000))},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def limit() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(SHARE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def engine(model: Path, **settings) -> LLM:
    defaults = {"load_format": "dummy", "gpu_memory_utilization": SHARE, "max_num_seqs": 256}
    return LLM(str(model), skip_tokenizer_init=True, device="cuda", **defaults | settings)


@pytest.mark.parametrize("prompt_logprobs", [None, 5])
@pytest.mark.usefixtures("limit")
def test_a_full_batch_of_long_requests_with_all_features_fits(model, prompt_logprobs) -> None:
    """More requests than places, more tokens than blocks, every feature, prompts in chunks."""
    rng = random.Random(0)
    length, count, max_tokens = (1400, 300, 60) if prompt_logprobs is None else (700, 24, 8)
    prompts = [
        {"prompt_token_ids": rng.choices(range(CONFIG["vocab_size"]), k=length)}
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
            **KINDS[i % len(KINDS)],
        )
        for i in range(count)
    ]
    with engine(model, max_model_len=8192) as llm:
        info = llm._core.info
        if prompt_logprobs is None:
            assert info.num_kv_blocks * info.block_size < 256 * (length + max_tokens), "too roomy"
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm._core.stats
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.max_memory_reserved() <= SHARE * total


@pytest.mark.usefixtures("limit")
def test_the_longest_contexts_fit_together(model) -> None:
    """As many as there are places, each of `max_model_len`: they take turns."""
    with engine(model, max_model_len=8192, max_num_seqs=64) as llm:
        prompts = [{"prompt_token_ids": [i + 1] * 8100} for i in range(64)]
        params = SamplingParams(temperature=1.0, max_tokens=92, ignore_eos=True, top_p=0.9)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 92 for output in outputs)


def test_too_small_a_share_is_refused_with_the_arithmetic(model) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.002 of .* GiB, less"):
        engine(model, gpu_memory_utilization=0.002)


@pytest.mark.usefixtures("limit")
def test_a_step_that_does_not_fit_is_refused_by_its_settings(model) -> None:
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens or max_num_seqs"):
        engine(model, max_num_batched_tokens=4_000_000, max_model_len=8192)


@pytest.mark.usefixtures("limit")
def test_weights_that_do_not_fit_are_refused(model) -> None:
    big = {**CONFIG, "num_hidden_layers": 100, "intermediate_size": 65536}
    (model / "config.json").write_text(json.dumps(big))
    with pytest.raises(ModelLoadError, match="do not fit cuda"):
        engine(model)
