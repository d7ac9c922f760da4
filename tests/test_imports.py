"""What is imported is what is used: start-up pays for every module."""

import subprocess
import sys

ENGINE = ("diptych.engine.llm", "diptych.engine.core", "diptych.engine.executor")
LIGHT = ("diptych.cli", "diptych.errors", "diptych.config_sources")


def imported(*modules: str) -> set[str]:
    """Top-level packages that a fresh interpreter has after importing these."""
    code = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    command = f"import {', '.join(modules)}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_an_engine_without_connector_brings_no_servers() -> None:
    heavy = {"grpc", "google", "jinja2", "yaml", "aiohttp", "transformers"}
    assert not heavy & imported(*ENGINE, "diptych.connectors.factory")


def test_the_command_line_brings_neither_torch_nor_servers() -> None:
    assert not {"torch", "grpc", "jinja2", "numpy", "msgspec"} & imported(*LIGHT)
