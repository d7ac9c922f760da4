"""The split over a GPU, through the Triton path, gives the answers of one engine on the CPU."""

from pathlib import Path

import pytest

from diptych import LLM
from tests.e2e.cluster import cluster
from tests.e2e.test_same_answer import PROMPTS, SAMPLING, offline, served
from tests.tiny_models import ARCHITECTURES, make_tiny_model

GPU = {
    "device": "cuda",
    "dtype": "float32",
    "attention_backend": "triton",
    "block_size": 64,
    "max_model_len": 1024,
    "gpu_memory_utilization": 0.05,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_split_on_a_gpu_gives_the_answers_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", architecture))
    with cluster(model, tmp_path) as made:
        store = made.kvstore()[1]
        prefill, prefill_address = made.worker("prefill", store=store, **GPU)
        decode, decode_address = made.worker("decode", store=store, **GPU)
        api = made.router(prefill_address, decode_address)[1]
        with LLM(model, device="cpu", max_model_len=1024, num_kv_blocks=256) as llm:
            made.wait_ready()
            for prompt in PROMPTS.values():
                for sampling in SAMPLING.values():
                    assert served(api, prompt, sampling) == offline(llm, prompt, sampling)
        assert decode.prompt_tokens("local_compute") == 0
        assert decode.prompt_tokens("external_kv_transfer") > 0
        assert prefill.prompt_tokens("local_compute") > 0
