"""The chart renders what the services need, and refuses what it does not know."""

from __future__ import annotations

import json
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
    return subprocess.run([str(HELM), *argv], capture_output=True, text=True, timeout=300)


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
            given = {
                entry["name"]: entry["value"].replace("$(POD_IP)", "10.0.0.1")
                for entry in item.get("env", [])
                if entry["name"].startswith("DIPTYCH_")
            }
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
    items = render("--set", "kvstore.drainSeconds=100")
    store = find(items, "StatefulSet", "llm-diptych-kvstore")["spec"]["template"]["spec"]
    assert store["terminationGracePeriodSeconds"] > 100


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
        (
            "autoscaling.enabled=true,autoscaling.decode.minReplicas=3,autoscaling.workerBudget=3",
            "Budget",
        ),
        ("autoscaling.enabled=true,router.replicas=2", "each router would run a planner"),
        ("model.cache.hostPath=/m,model.cache.existingClaim=m", "not both"),
        ("model.cache.hostPath=m", "hostPath"),
        ("decode.strategy.type=Rolling", "strategy"),
    ],
)
def test_wrong_values_are_refused(values: str, message: str) -> None:
    done = helm("template", "llm", str(CHART), "--set", values)

    assert done.returncode != 0
    assert message in done.stderr


def test_names_that_everybody_expects_are_accepted() -> None:
    items = render(
        "--set",
        "nameOverride=n,fullnameOverride=f,commonLabels.team=t,global.imageRegistry=reg.local:5000,"
        "imagePullSecrets[0].name=s,serviceAccount.create=false,serviceAccount.name=mine",
    )

    assert {"f-router", "f-prefill", "f-decode", "f-kvstore"} <= {
        i["metadata"]["name"] for i in items
    }
    assert not [i for i in items if i["kind"] == "ServiceAccount"]
    for pod in pods(items):
        assert pod["spec"]["imagePullSecrets"] == [{"name": "s"}]
        assert pod["spec"]["containers"][0]["image"].startswith("reg.local:5000/")
        assert pod["metadata"]["labels"]["team"] == "t"


def test_a_pool_that_is_recreated_has_no_rolling_figures() -> None:
    decode = find(
        render("--set", "decode.strategy.type=Recreate"), "Deployment", "llm-diptych-decode"
    )

    assert decode["spec"]["strategy"] == {"type": "Recreate"}


def test_the_user_may_be_left_to_the_platform() -> None:
    for pod in pods(render("--set", "podSecurityContext.runAsUser=null")):
        assert "runAsUser" not in pod["spec"]["securityContext"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_a_model_directory_can_be_mounted_wherever_it_is_read() -> None:
    volume = "extraVolumes[0].name=m,{0}.extraVolumes[0].hostPath.path=/m"
    mount = "extraVolumeMounts[0].name=m,{0}.extraVolumeMounts[0].mountPath=/m"
    values = [
        f"{part}.{item.format(part)}"
        for part in ("router", "workerDefaults")
        for item in (volume, mount)
    ]
    items = render("--set", ",".join(["model.name=/m", *values]))

    for name in ("router", "prefill", "decode"):
        assert {"name": "m", "mountPath": "/m"} in container(items, name)["volumeMounts"]


def test_every_written_path_is_a_volume() -> None:
    """The root is read-only: what the environment points to must be mounted."""
    for pod in pods(render()):
        for item in pod["spec"]["containers"]:
            mounts = [mount["mountPath"] for mount in item["volumeMounts"]]
            assert "/tmp" in mounts
            for entry in item.get("env", []):
                value = str(entry.get("value", ""))
                if value.startswith("/"):
                    assert any(value == m or value.startswith(f"{m}/") for m in mounts), entry


def test_the_store_is_named_so_that_it_may_move() -> None:
    config = find(render(), "ConfigMap", "llm-diptych-decode")["data"]["config.yaml"]

    assert yaml.safe_load(config)["worker"]["kvstore"] == "llm-diptych-kvstore:7101"


def test_certificates_of_the_hand_off_come_from_a_secret() -> None:
    flags = "handoff.tls.secretName=kv,handoff.tls.serverName=worker.kv"
    items = render("--set", flags)

    for pool in ("prefill", "decode"):
        config = find(items, "ConfigMap", f"llm-diptych-{pool}")["data"]["config.yaml"]
        worker = yaml.safe_load(config)["worker"]
        assert worker["kv_tls_name"] == "worker.kv"
        pod = find(items, "Deployment", f"llm-diptych-{pool}")["spec"]["template"]["spec"]
        [volume] = [v for v in pod["volumes"] if v["name"] == "kv-tls"]
        assert volume["secret"] == {"secretName": "kv"}
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        for name in ("certificate", "key", "authority"):
            assert worker[f"kv_tls_{name}"].startswith(mounts["kv-tls"] + "/")


def test_several_stores_are_found_in_the_registry() -> None:
    items = render("--set", "kvstore.replicas=3")

    config = find(items, "ConfigMap", "llm-diptych-decode")["data"]["config.yaml"]
    assert "kvstore" not in yaml.safe_load(config)["worker"]
    store = find(items, "StatefulSet", "llm-diptych-kvstore")["spec"]
    assert store["replicas"] == 3
    env = {e["name"]: e.get("value") for e in store["template"]["spec"]["containers"][0]["env"]}
    assert env["DIPTYCH_KVSTORE_NODE_ID"] == "$(POD_NAME)"


def test_the_disk_tier_has_a_volume_of_each_nodes_own(tmp_path: Path) -> None:
    flags = "kvstore.disk.enabled=true,kvstore.disk.storageClassName=fast"
    items = render("--set", flags)

    store = find(items, "StatefulSet", "llm-diptych-kvstore")["spec"]
    [claim] = store["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "20Gi"}
    assert claim["spec"]["storageClassName"] == "fast"
    mounts = store["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "disk", "mountPath": "/kv"} in mounts
    file = tmp_path / "config.yaml"
    file.write_text(find(items, "ConfigMap", "llm-diptych-kvstore")["data"]["config.yaml"])
    config = load(("kvstore",), {}, {}, str(file))["kvstore"]
    assert (config.ssd_path, config.ssd_bytes) == ("/kv/objects", 19327352832)
    plain = find(render(), "StatefulSet", "llm-diptych-kvstore")["spec"]
    assert "volumeClaimTemplates" not in plain


def test_a_change_of_configuration_restarts_the_pods_it_is_for() -> None:
    def checksums(*argv: str) -> dict[str, str]:
        return {
            pod["spec"]["containers"][0]["name"]: pod["metadata"]["annotations"]["checksum/config"]
            for pod in pods(
                render("--set", "redis.enabled=false,externalRedis.url=redis://r", *argv)
            )
        }

    before, after = checksums(), checksums("--set", "kvstore.poolBytes=2097152")
    assert {name for name in before if before[name] != after[name]} == {"kvstore"}


def test_the_test_pod_brings_a_key_where_one_is_needed() -> None:
    items = render("--set", "router.apiKeys.existingSecret=keys")
    test = find(items, "Pod", "llm-diptych-test")["spec"]

    assert {"name": "API_KEYS", "value": "/etc/diptych-keys/api-keys"} in test["containers"][0][
        "env"
    ]
    assert test["volumes"] == [{"name": "api-keys", "secret": {"secretName": "keys"}}]
    compile(test["containers"][0]["args"][0], "completion.py", "exec")


def test_manifests_of_the_user_are_rendered() -> None:
    name = "{{ .Release.Name }}-x"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    items = render("--set-json", f"extraObjects={json.dumps([secret])}")

    assert find(items, "Secret", "llm-x")


def test_pods_are_monitored_where_the_kind_exists() -> None:
    values = ("--set", "metrics.podMonitor.enabled=true")

    assert not [i for i in render(*values) if i["kind"] == "PodMonitor"]
    monitor = find(
        render(*values, "--api-versions", "monitoring.coreos.com/v1"), "PodMonitor", "llm-diptych"
    )
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "admin"


def test_long_and_dotted_names_stay_valid() -> None:
    for item in render("--set", f"fullnameOverride={'x' * 60},model.servedName=org/m.1"):
        assert len(item["metadata"]["name"]) <= 63
