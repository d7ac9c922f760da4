"""The life of a release on a real API server: install, upgrade, rollback, uninstall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kube.api_server import ApiServer
from tests.kube.conftest import CHART, Helm

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
CORE = "/api/v1/namespaces/life"
DEPLOYMENTS = "/apis/apps/v1/namespaces/life/deployments"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_release_lives_and_leaves_nothing(helm: Helm, server: ApiServer, example: Path) -> None:
    values = ["-f", str(example), *without_absent_kinds(server)]
    where = ["-n", "life"]
    helm("install", "r", helm.chart, *where, "--create-namespace", *values)
    tickets = server.call("GET", f"{CORE}/secrets/r-diptych-tickets")["data"]
    decode = grace_s(server)

    helm("upgrade", "r", helm.chart, *where, *values, "--set", "decode.drainSeconds=100")
    assert grace_s(server) == decode + 40
    kept = server.call("GET", f"{CORE}/secrets/r-diptych-tickets")["data"]
    assert kept == tickets, "new keys would refuse the requests in flight"

    helm("rollback", "r", "1", *where)
    assert grace_s(server) == decode
    history = json.loads(helm("history", "r", *where, "-o", "json"))
    assert [entry["status"] for entry in history] == ["superseded", "superseded", "deployed"]

    helm("uninstall", "r", *where)
    assert left_over(server) == []


def without_absent_kinds(server: ApiServer) -> list[str]:
    """Budgets are left out where the server does not have policy/v1 yet (before 1.21)."""
    versions = server.call("GET", "/apis/policy")["versions"]
    has_budgets = any(version["version"] == "v1" for version in versions)
    return [] if has_budgets else ["--set", "workerDefaults.pdb.enabled=false"]


def grace_s(server: ApiServer) -> int:
    spec: dict[str, Any] = server.call("GET", f"{DEPLOYMENTS}/r-diptych-decode")["spec"]
    return int(spec["template"]["spec"]["terminationGracePeriodSeconds"])


def left_over(server: ApiServer) -> list[str]:
    kinds = ("secrets", "configmaps", "services", "serviceaccounts", "pods")
    paths = [f"{CORE}/{kind}" for kind in kinds]
    paths += [DEPLOYMENTS, DEPLOYMENTS.replace("deployments", "statefulsets")]
    names = [item["metadata"]["name"] for p in paths for item in server.call("GET", p)["items"]]
    return [name for name in names if "r-diptych" in name]
