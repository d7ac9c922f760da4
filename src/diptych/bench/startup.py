"""`diptych bench startup`: seconds until an engine is ready: torch, what is ours, the engine.

With `--write-weights DIR` it first writes the model there with random weights and then ends: a
second run with `--model DIR` measures loading as it will be.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.bench import peer_vllm
from diptych.bench.offline import add_engine_arguments, make_llm, model_directory, report, say

if TYPE_CHECKING:
    from diptych.engine.llm import LLM

# what the engine's process imports beside torch
_MODULES = (
    "diptych.engine.llm",
    "diptych.engine.core",
    "diptych.engine.executor",
    "diptych.connectors.factory",
)
_GPU_MODULES = ("diptych.kernels.triton_ops",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds of each part. The sum is `ready_s`, counted from the start of the process.

    Figures of a process that had imported torch before mean nothing.
    """

    own_imports_s: float
    torch_import_s: float
    engine_s: float

    @property
    def ready_s(self) -> float:
        return self.own_imports_s + self.torch_import_s + self.engine_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--write-weights", type=Path, metavar="DIR", help="write random safetensors there, end")
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    if args.write_weights is not None:
        return _write_weights(args)
    # the engine says how long each stage of its start took
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    llm, start_up = timed_start(lambda: make_llm(args))
    with llm:
        device = llm.device
    figures = {**asdict(start_up), "ready_s": start_up.ready_s}
    for name, seconds in figures.items():
        say(f"{name:16} {seconds:7.2f}")
    if peer_vllm.applies(args.model, args.dtype, device):
        imports, ready = peer_vllm.IMPORTS_S, peer_vllm.READY_S
        say(f"goals: own imports {imports.goal:g} s, ready {ready.goal:g} s")
        say(f"{peer_vllm.NAME}: {imports.peer:g} s, {ready.peer:g} s (compiling)")
    report("startup", args, device, figures)
    return 0


def _write_weights(args: argparse.Namespace) -> int:
    from diptych.bench.random_weights import write_random_model
    from diptych.engine.device import choose_device, choose_dtype
    from diptych.models.config import ModelConfig

    source, device = model_directory(args), choose_device(args.device)
    dtype = choose_dtype(args.dtype, ModelConfig.from_directory(source), device)
    write_random_model(source, args.write_weights, device=device, dtype=dtype, seed=args.seed)
    size = sum(file.stat().st_size for file in args.write_weights.iterdir())
    say(f"wrote {size / 1e9:.2f} GB into {args.write_weights}")
    return 0


def timed_start(make: Callable[[], LLM]) -> tuple[LLM, StartUp]:
    """Import torch, then what is ours, then make the engine.

    What ran in this process before counts as our imports: the interpreter and the command line.
    """
    before_s = process_age_s()
    began = time.perf_counter()
    import torch

    torch_done = time.perf_counter()
    modules = _MODULES + (_GPU_MODULES if torch.cuda.is_available() else ())
    for name in modules:
        import_module(name)
    imported = time.perf_counter()
    llm = make()
    return llm, StartUp(
        own_imports_s=before_s + imported - torch_done,
        torch_import_s=torch_done - began,
        engine_s=time.perf_counter() - imported,
    )


def process_age_s() -> float:
    """Seconds since this process was started (Linux; to the hundredth)."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
