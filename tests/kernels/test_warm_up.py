"""Whatever a step is, warm-up has launched every kernel that it launches, for the same variant.

On a CPU launches are noted in place of being run: for what they would have been compiled. On a GPU
`tests/gpu/test_compiles.py` counts what is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.warm_up import Shape, serving_shapes, warm_up
from tests.engine.mixed_steps import run_mixed_steps
from tests.engine.runner_driver import RunnerDriver
from tests.tiny_models import make_tiny_model

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu counts what is compiled", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

MOST_SEQS, MOST_TOKENS, MAX_LEN = 40, 6000, 9000


class Launches:
    """The variants that have been launched."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()
        self.count = 0

    def note(self, kernel: InterpretedFunction, *args: Any, **options: Any) -> None:
        """In place of a launch; every tensor becomes zero, a valid token, row and block."""
        options.pop("grid"), options.pop("warmup")
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        parameters = inspect.signature(kernel.fn).parameters
        unspecialised = kernel.kwargs.get("do_not_specialize") or ()
        key = tuple(
            value
            if "constexpr" in str(parameters[name].annotation)
            else _variant(value, name not in unspecialised)
            for name, value in values.items()
        )
        for value in values.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        self.count += 1
        self.seen.add((kernel.__name__, key, tuple(sorted(options.items()))))


def _variant(value: Any, specialises: bool) -> Hashable:
    """What of an argument Triton compiles for; on a GPU every tensor starts at 16 bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int) and specialises:
        return (value == 1, value % 16 == 0)
    return value if value is None else type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """On a device as large as an H200."""
    noted = Launches()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *a, **k: noted.note(kernel, *a, **k)
    )
    monkeypatch.setattr(
        "diptych.kernels.paged_decode_attention.num_multiprocessors", lambda device: 132
    )
    return noted


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_no_step_launches_what_warm_up_has_not(
    architecture: str, launches: Launches, tmp_path: Path
) -> None:
    model = make_tiny_model(
        tmp_path, architecture, num_hidden_layers=1, max_position_embeddings=MAX_LEN
    )
    driver = RunnerDriver(
        model,
        attention_backend="triton",
        dtype="bfloat16",
        block_size=64,
        num_kv_blocks=40 * MAX_LEN // 64,
        max_model_len=MAX_LEN,
        max_num_seqs=MOST_SEQS,
        max_num_batched_tokens=MOST_TOKENS,
    )
    runner = driver.executor._runner
    assert runner is not None
    shapes = serving_shapes(MOST_SEQS, MOST_TOKENS, MAX_LEN)
    layout = driver.executor.kv_layout
    warm_up(runner._model, runner._sampler, runner._kv_cache, layout, shapes)
    warm, before = set(launches.seen), launches.count
    run_mixed_steps(
        driver, 150, most_seqs=MOST_SEQS, most_tokens=MOST_TOKENS, max_model_len=MAX_LEN
    )
    assert launches.count > before + 100
    assert launches.seen == warm


def test_the_shapes_reach_every_limit() -> None:
    shapes = serving_shapes(256, 8192, 131072)
    assert Shape(256, 1, 131072) in shapes
    assert Shape(1, 1, 1) in shapes
    assert Shape(1, 8192, 8192) in shapes
    assert serving_shapes(1, 1, 1) == [Shape(1, 1, 1)]
    assert all(s.tokens <= 100 for s in serving_shapes(8, 8192, 100))
