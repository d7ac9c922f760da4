"""Write down a measurement so that it can be compared a year later: one JSON a run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DEFAULT_DIRECTORY = Path("bench/results")
PACKAGES = ("diptych", "torch", "triton", "transformers", "numpy")


def write_result(
    name: str,
    payload: Mapping[str, Any],
    *,
    device: str = "cpu",
    directory: Path | str = DEFAULT_DIRECTORY,
) -> Path:
    """Write `payload` with where, when and by what it was measured.

    Args:
        name: the benchmark, for the file's name: `<date>-<name>-<device>.json`. A file of that
            name is overwritten.
        payload: what was measured and with which settings; JSON values, units in the names.
        device: the torch device it ran on, `cpu` or `cuda[:N]`.
        directory: made if absent.

    Returns:
        The file.
    """
    now = datetime.now(UTC)
    record = {"name": name, "date": now.isoformat(timespec="seconds"), **environment(device)}
    clash = record.keys() & payload.keys()
    if clash:
        raise ValueError(f"payload must not name {', '.join(sorted(clash))}")
    slug = re.sub(r"[^a-z0-9]+", "-", str(record["device"]).lower()).strip("-")
    path = Path(directory) / f"{now:%Y-%m-%d}-{name}-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **payload}, indent=2) + "\n", encoding="utf-8")
    return path


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device, versions and commit."""
    found = {"device": _cpu_name(), "num_cpus": os.cpu_count()}
    versions = {"python": platform.python_version(), **_package_versions()}
    if device.startswith("cuda"):
        import torch

        found = {
            "device": torch.cuda.get_device_name(device),
            "num_gpus": torch.cuda.device_count(),
        }
        versions["cuda"] = torch.version.cuda
    return {**found, "versions": versions, "commit": _commit()}


def _package_versions() -> dict[str, str | None]:
    import importlib.metadata  # takes its time, which start-up would be charged with

    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _commit() -> str | None:
    """The commit that ran, `-dirty` with changes on top.

    `DIPTYCH_COMMIT` comes first: a copied tree may lie in a repository that is behind, or in none.
    """
    if named := os.environ.get("DIPTYCH_COMMIT"):
        return named
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return described or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
