"""Each device gets its ops, and Triton is imported only when chosen."""

import subprocess
import sys

import pytest
import torch

from diptych.errors import ConfigError
from diptych.kernels.dispatch import select_ops
from diptych.kernels.host_memory import keep_freed_memory
from diptych.kernels.torch_ops import TorchOps


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cpu_gets_torch(backend) -> None:
    assert isinstance(select_ops(torch.device("cpu"), backend), TorchOps)


def test_triton_on_a_cpu_is_refused_before_a_launch_fails(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        select_ops(torch.device("cpu"), "triton")


def test_a_missing_triton_is_named(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "diptych.kernels.triton_ops", None)
    with pytest.raises(ConfigError, match="attention_backend triton needs"):
        select_ops(torch.device("cpu"), "triton")


def test_torch_ops_do_not_import_triton() -> None:
    code = (
        "import sys, torch\n"
        "from diptych.kernels.dispatch import select_ops\n"
        "select_ops(torch.device('cpu'))\n"
        "assert not [name for name in sys.modules if name.startswith('diptych.kernels.triton')]\n"
        "assert 'triton' not in sys.modules or 'triton' in before"
    )
    code = code.replace("import sys, torch\n", "import sys, torch\nbefore = set(sys.modules)\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_an_engine_process_keeps_freed_memory() -> None:
    assert keep_freed_memory()
