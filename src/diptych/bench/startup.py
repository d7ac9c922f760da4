"""How long a process takes until its engine is ready: torch, what is ours, the engine itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from diptych.engine.llm import LLM

# what the engine's process imports beside torch
_MODULES = ("diptych.engine.core", "diptych.engine.executor", "diptych.connectors.factory")
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
