"""The planner's scaler on a real API server, with the rights that the chart gives the router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diptych.clock import SystemClock
from diptych.config import PlannerConfig
from diptych.errors import UnavailableError
from diptych.services.router.planner import PoolLoad
from diptych.services.router.planner_loop import PlannerLoop
from diptych.services.router.scalers import KubernetesScaler
from tests.kube.api_server import ApiServer, Refused
from tests.kube.conftest import Helm

pytestmark = pytest.mark.anyio

DEPLOYMENTS = "/apis/apps/v1/namespaces/llm/deployments"
CONFIG = PlannerConfig(
    kubernetes_namespace="llm",
    prefill_target="apps/v1/Deployment/one-diptych-prefill",
    decode_target="apps/v1/Deployment/one-diptych-decode",
    max_prefill=4,
    min_decode=2,
    max_decode=4,
)


@pytest.fixture(scope="module")
def release(helm: Helm) -> Iterator[None]:
    helm(
        *("install", "one", helm.chart, "-n", "llm", "--create-namespace"),
        *("--set", "autoscaling.enabled=true"),
    )
    yield
    helm("uninstall", "one", "-n", "llm")


@pytest.fixture
def token(server: ApiServer, release: None) -> str:
    return server.token_of("llm", "one-diptych-router")


@pytest.fixture
async def scaler(server: ApiServer, token: str, tmp_path: Path) -> AsyncIterator[KubernetesScaler]:
    scaler = make_scaler(CONFIG, server, token, tmp_path)
    yield scaler
    await scaler.close()


def make_scaler(
    config: PlannerConfig, server: ApiServer, token: str, folder: Path
) -> KubernetesScaler:
    (folder / "token").write_text(token)
    return KubernetesScaler(
        config, url=server.url, token_file=folder / "token", ca_file=server.ca_file
    )


def replicas(server: ApiServer, name: str) -> int:
    return int(server.call("GET", f"{DEPLOYMENTS}/{name}")["spec"]["replicas"])


async def test_the_router_scales_its_two_pools(server: ApiServer, scaler: KubernetesScaler) -> None:
    for pool, size in (("prefill", 3), ("decode", 4), ("prefill", 1)):
        await scaler.scale(pool, size)

        assert await scaler.replicas(pool) == size
        assert replicas(server, f"one-diptych-{pool}") == size


async def test_the_planner_brings_a_fresh_release_to_its_least(
    server: ApiServer, scaler: KubernetesScaler
) -> None:
    await scaler.scale("decode", 1)

    def observe(pool: str) -> PoolLoad:
        return PoolLoad(0, 0, None, None)

    await PlannerLoop(CONFIG, observe, scaler, SystemClock()).decide()

    assert replicas(server, "one-diptych-decode") == 2
    assert replicas(server, "one-diptych-prefill") == 1


async def test_a_change_since_the_decision_is_a_conflict_and_stays(
    server: ApiServer, scaler: KubernetesScaler
) -> None:
    await scaler.replicas("decode")
    path = f"{DEPLOYMENTS}/one-diptych-decode/scale"
    server.call("PATCH", path, {"spec": {"replicas": 7}}, patch=True)

    with pytest.raises(UnavailableError, match=r"409 .*has been modified"):
        await scaler.scale("decode", 3)
    assert replicas(server, "one-diptych-decode") == 7

    await scaler.scale("decode", 3)
    assert replicas(server, "one-diptych-decode") == 3


async def test_other_deployments_are_out_of_reach(
    server: ApiServer, token: str, tmp_path: Path
) -> None:
    target = "apps/v1/Deployment/one-diptych-router"
    scaler = make_scaler(
        PlannerConfig(kubernetes_namespace="llm", decode_target=target), server, token, tmp_path
    )

    with pytest.raises(UnavailableError, match=r"one-diptych-router/scale: 403 .*forbidden"):
        await scaler.scale("decode", 2)
    await scaler.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/apis/apps/v1/namespaces/llm/deployments"),
        ("GET", "/apis/apps/v1/namespaces/llm/deployments/one-diptych-decode"),
        ("PATCH", "/apis/apps/v1/namespaces/llm/deployments/one-diptych-decode"),
        ("PATCH", "/apis/apps/v1/namespaces/llm/deployments/one-diptych-router/scale"),
        ("PATCH", "/apis/apps/v1/namespaces/default/deployments/one-diptych-decode/scale"),
        ("GET", "/api/v1/namespaces/llm/secrets/one-diptych-tickets"),
        ("GET", "/api/v1/namespaces/llm/pods"),
    ],
)
def test_the_routers_account_may_do_nothing_else(
    server: ApiServer, token: str, method: str, path: str
) -> None:
    body = {"spec": {"replicas": 2}} if method == "PATCH" else None

    with pytest.raises(Refused, match="forbidden") as refused:
        server.call(method, path, body, token=token, patch=True)
    assert refused.value.status == 403


async def test_a_token_that_is_not_valid_is_a_named_error(
    server: ApiServer, tmp_path: Path
) -> None:
    scaler = make_scaler(CONFIG, server, "none", tmp_path)

    with pytest.raises(UnavailableError, match="401 Unauthorized"):
        await scaler.replicas("decode")
    await scaler.close()


async def test_what_the_planner_set_survives_an_upgrade(
    helm: Helm, server: ApiServer, scaler: KubernetesScaler
) -> None:
    await scaler.scale("decode", 4)
    helm(
        *("upgrade", "one", helm.chart, "-n", "llm", "--set", "autoscaling.enabled=true"),
        *("--set", "decode.drainSeconds=90"),
    )

    assert replicas(server, "one-diptych-decode") == 4
