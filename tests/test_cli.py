"""The command line is quick, complete and clear about mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = (
    "up",
    "serve",
    "router",
    "prefill",
    "decode",
    "worker",
    "kvstore",
    "chat",
    "config",
    "doctor",
)

BENCHES = ("latency", "throughput", "kernels", "kvstore", "transport")
HELPS = [[], *([name] for name in COMMANDS), ["bench"], *(["bench", name] for name in BENCHES)]


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        env={**__import__("os").environ, **environment},
    )


@pytest.mark.parametrize("argv", HELPS)
def test_help_imports_neither_torch_nor_the_services(argv: list[str]) -> None:
    code = (
        "import sys\nfrom diptych.cli import main\n"
        f"try:\n    main({[*argv, '--help']!r})\nexcept SystemExit:\n    pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'aiohttp')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300
    )

    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


def test_import_diptych_leaves_torch_out() -> None:
    code = "import sys, diptych; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300
    )

    assert done.stdout.strip() == "False False"


def test_help_names_every_command() -> None:
    text = run("--help").stdout

    assert all(name in text for name in COMMANDS)


def test_config_show_prints_what_the_environment_gives() -> None:
    assert "port: 9999" in run("config", "show", DIPTYCH_ROUTER_PORT="9999").stdout
    shown = run("config", "show", "prefill", "--kv-lease-s", "7", DIPTYCH_WORKER_PORT="9999").stdout
    assert "kv_lease_s: 7.0" in shown
    assert "port: 9999" in shown
    assert "router:" not in shown


@pytest.mark.parametrize("kind", ["kvstore", "transport"])
def test_a_transport_that_nobody_knows_is_not_measured(kind: str) -> None:
    done = run("bench", kind, "--transport", "foo")

    assert done.returncode == 2
    assert "invalid choice: 'foo'" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_show_of_up_has_the_sections_that_are_no_flags_of_it() -> None:
    shown = run("config", "show", "up", "--port", "81", DIPTYCH_KVSTORE_SSD_PATH="/nvme").stdout
    for section in ("up", "engine", "router", "planner", "redis", "kvstore", "worker"):
        assert f"\n{section}:\n" in f"\n{shown}", section
    assert "port: 81" in shown
    assert "ssd_path: /nvme" in shown


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["router", "--port", "x"], {}, "router.port must be a whole number"),
        (["config", "show"], {"DIPTYCH_ENGINE_MODLE": "x"}, "DIPTYCH_ENGINE_MODLE"),
        (["config", "show", "--config", "/nowhere.yaml"], {}, "/nowhere.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_clear_line(
    argv: list[str], environment: dict[str, str], message: str
) -> None:
    done = run(*argv, **environment)

    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
