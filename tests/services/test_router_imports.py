"""The router process stays light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "triton", "safetensors.torch")


def test_the_router_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, diptych.services.router.main\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "allowed = {'diptych.engine', 'diptych.engine.request'}\n"
        "engine = [m for m in sys.modules if m.startswith('diptych.engine')]\n"
        "print([*heavy, *sorted(set(engine) - allowed)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
