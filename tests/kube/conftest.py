"""One API server for all tests here, and the chart installed into it by a real helm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kube.api_server import ApiServer, missing_assets, running_api_server

CHART = Path(__file__).resolve().parents[2] / "helm" / "diptych"


class Helm:
    """The `helm` command against one API server."""

    def __init__(self, binary: str, server: ApiServer, chart: Path, home: Path) -> None:
        self._binary = binary
        self._server = server
        self.chart = str(chart)
        self._environment = {
            **os.environ,
            "KUBECONFIG": str(server.kubeconfig),
            "HOME": str(home),
        }

    def __call__(self, *argv: str) -> str:
        done = subprocess.run(
            [self._binary, *argv],
            capture_output=True,
            text=True,
            timeout=120,
            env=self._environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if reason := missing_assets():
        pytest.skip(reason)
    with running_api_server(tmp_path_factory.mktemp("api-server")) as server:
        yield server


@pytest.fixture(scope="session")
def helm(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    binary = os.environ.get("HELM") or shutil.which("helm")
    if binary is None:
        pytest.skip("helm is not installed: `make helm`")
    folder = tmp_path_factory.mktemp("helm")
    chart = folder / "diptych"
    shutil.copytree(CHART, chart)
    version = server.call("GET", "/version")
    if (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 27):
        # older than the chart supports, but its scale subresource, RBAC and versions are the same
        metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
        del metadata["kubeVersion"]
        (chart / "Chart.yaml").write_text(yaml.safe_dump(metadata))
    return Helm(binary, server, chart, folder)
