"""Once an engine is ready, no step compiles a kernel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych import LLM, SamplingParams
from diptych.connectors.kv_checksums import TorchChecksums
from diptych.connectors.plan_geometry import PoolGeometry, Span
from tests.engine.mixed_steps import PARAMS, run_mixed_steps
from tests.engine.runner_driver import RunnerDriver
from tests.tiny_models import make_tiny_model

MAX_LEN = 9000
SETTINGS = {
    "device": "cuda",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 40,
    "max_num_batched_tokens": 6000,
    "num_kv_blocks": 40 * MAX_LEN // 64,
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled, or found compiled on the disk, from now on."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    importlib.import_module("diptych.kernels.triton_ops")
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("diptych.kernels") else ():
            if isinstance(value, JITFunction):
                value.device_caches.clear()  # of the engines before
    names: list[str] = []

    def note(*, repr: str, **_: Any) -> None:
        names.append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    return names


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_mixed_steps_compile_nothing(
    enforce_eager: bool, dtype: str, compiled: list[str], tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, max_position_embeddings=MAX_LEN)
    driver = RunnerDriver(model, dtype=dtype, enforce_eager=enforce_eager, **SETTINGS)
    assert compiled  # the hook is called
    compiled.clear()
    run_mixed_steps(driver, 300, most_seqs=40, most_tokens=6000, max_model_len=MAX_LEN)
    assert compiled == []


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_a_served_workload_compiles_nothing(
    architecture: str, compiled: list[str], tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, architecture, max_position_embeddings=MAX_LEN)
    with LLM(str(model), **SETTINGS) as llm:
        compiled.clear()
        prompts = [{"prompt_token_ids": [7] * (1 + 37 * i % 3000)} for i in range(90)]
        params = [PARAMS[i % len(PARAMS)].replace(max_tokens=1 + i % 50) for i in range(90)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate(prompts[:1], SamplingParams(max_tokens=5, logprobs=2), use_tqdm=False)
    assert compiled == []


def test_checksums_of_hand_offs_compile_nothing(compiled: list[str]) -> None:
    """Whatever the length: a number of tokens is no constant of the kernel."""
    pool = torch.zeros(40, 8, 4, 2, 64, 128, dtype=torch.bfloat16, device="cuda")
    geometry = PoolGeometry(
        num_blocks=40, block_size=64, heads=Span(0, 8), layers=Span(0, 4), atom_bytes=256
    )
    checksums = TorchChecksums(pool, geometry)
    assert compiled
    compiled.clear()
    for end in (1, 16, 64, 65, 2048, 2049):
        checksums.begin(list(range(40)), 0, end, 64)()
    assert compiled == []
