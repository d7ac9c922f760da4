"""The chart renders what the services need, and refuses what it does not know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych.config_sources import load

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "diptych"
HELM = os.environ.get("HELM") or shutil.which("helm")
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed: `make helm`")


def helm(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *argv], capture_output=True, text=True, timeout=60)


def render(*argv: str) -> list[dict[str, Any]]:
    done = helm("template", "llm", str(CHART), "--kube-version", "1.33", *argv)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def find(items: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(i for i in items if i["kind"] == kind and i["metadata"]["name"] == name)


def pods(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = ("Deployment", "StatefulSet")
    return [i["spec"]["template"] for i in items if i["kind"] in kinds]


def container(items: list[dict[str, Any]], pool: str) -> dict[str, Any]:
    spec = find(items, "Deployment", f"llm-diptych-{pool}")["spec"]["template"]["spec"]
    return dict(spec["containers"][0])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_lint_is_strictly_clean(example: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(example))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_object_fits_the_schemas_of_kubernetes(example: Path, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for item in render("-f", str(example)):
        validate.validate(item, version, strict=True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_configuration_file_is_one_that_the_service_loads(
    example: Path, tmp_path: Path
) -> None:
    maps = [i for i in render("-f", str(example)) if i["kind"] == "ConfigMap"]

    for item in maps:
        file = tmp_path / f"{item['metadata']['name']}.yaml"
        file.write_text(item["data"]["config.yaml"])
        load(tuple(yaml.safe_load(file.read_text())), {}, {}, str(file))
    assert len(maps) == 4


def test_variables_are_ones_that_the_services_read() -> None:
    for pod in pods(render()):
        for item in pod["spec"]["containers"]:
            names = {entry["name"] for entry in item.get("env", [])}
            given = {name: "1" for name in names if name.startswith("DIPTYCH_")}
            load(("worker", "kvstore", "redis"), {}, given)


def test_gpus_stand_in_requests_and_limits_as_text() -> None:
    resources = container(render("-f", str(CHART / "examples" / "gpu.yaml")), "decode")["resources"]

    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert resources["requests"]["nvidia.com/gpu"] == "1"


def test_the_planner_owns_replicas_and_may_scale_nothing_else() -> None:
    items = render("-f", str(CHART / "examples" / "gpu.yaml"))
    router = find(items, "Deployment", "llm-diptych-router")

    for pool in ("prefill", "decode"):
        assert "replicas" not in find(items, "Deployment", f"llm-diptych-{pool}")["spec"]
    assert find(items, "Role", "llm-diptych-router")["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["llm-diptych-prefill", "llm-diptych-decode"],
            "verbs": ["get", "patch"],
        }
    ]
    assert router["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


def test_without_the_planner_replicas_are_rendered_and_nobody_may_scale() -> None:
    items = render("--set", "decode.replicas=3")

    assert find(items, "Deployment", "llm-diptych-decode")["spec"]["replicas"] == 3
    assert find(items, "Deployment", "llm-diptych-prefill")["spec"]["replicas"] == 1
    assert not [i for i in items if i["kind"] in ("Role", "RoleBinding")]


def test_startup_owns_weight_loading_and_liveness_does_not_wait_for_the_model() -> None:
    prefill = container(render("--set", "model.loadTimeoutSeconds=600"), "prefill")

    startup = prefill["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 600
    assert prefill["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_the_grace_period_covers_drain_and_propagation() -> None:
    items = render("--set", "decode.drainSeconds=100,decode.preStopSleepSeconds=20")
    spec = find(items, "Deployment", "llm-diptych-decode")["spec"]["template"]["spec"]

    assert spec["terminationGracePeriodSeconds"] > 120


def test_every_pod_is_locked_down() -> None:
    for pod in pods(render()):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        for item in spec["containers"]:
            assert item["securityContext"]["readOnlyRootFilesystem"] is True
            assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_an_external_redis_replaces_the_one_in_the_chart() -> None:
    items = render("--set", "redis.enabled=false,externalRedis.url=redis://r:6379")

    assert not [i for i in items if i["metadata"]["name"].endswith("-redis")]
    env = container(items, "decode")["env"]
    assert {"name": "DIPTYCH_REDIS_REDIS", "value": "redis://r:6379"} in env


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("poolz=1", "poolz"),
        ("decode.replica=1", "replica"),
        ("router.replicas=0", "replicas"),
        ("redis.enabled=false", "externalRedis"),
        ("externalRedis.url=http://x", "url"),
        ("autoscaling.enabled=true,autoscaling.decode.minReplicas=5", "above maxReplicas"),
    ],
)
def test_wrong_values_are_refused(values: str, message: str) -> None:
    done = helm("template", "llm", str(CHART), "--set", values)

    assert done.returncode != 0
    assert message in done.stderr


def test_long_and_dotted_names_stay_valid() -> None:
    for item in render("--set", f"fullnameOverride={'x' * 60},model.servedName=org/m.1"):
        assert len(item["metadata"]["name"]) <= 63
