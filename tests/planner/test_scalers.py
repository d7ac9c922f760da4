"""Scalers do what they are told, and say clearly what was refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from diptych.clock import SystemClock
from diptych.config import PlannerConfig
from diptych.errors import ConfigError, UnavailableError
from diptych.services.router.planner import PoolLoad
from diptych.services.router.planner_loop import PlannerLoop
from diptych.services.router.scalers import KubernetesScaler, LocalScaler, api_server, scale_path

pytestmark = pytest.mark.anyio


class FakeApiServer:
    """The scale subresource of two Deployments, with versions, as the API server answers it."""

    def __init__(self) -> None:
        self.replicas = {"diptych-prefill": 1, "diptych-decode": 1}
        self.version = 1
        self.refuse = 0
        self.app = web.Application()
        path = "/apis/apps/v1/namespaces/ns/deployments/{name}/scale"
        self.app.add_routes([web.get(path, self.get), web.patch(path, self.patch)])

    async def get(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer t0ken" or self.refuse:
            return web.json_response({"message": "forbidden"}, status=self.refuse or 401)
        return web.json_response(self.scale(request.match_info["name"]))

    async def patch(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        body = json.loads(await request.text())
        if body["metadata"]["resourceVersion"] != str(self.version):
            return web.json_response({"message": "the object has been modified"}, status=409)
        self.replicas[request.match_info["name"]] = body["spec"]["replicas"]
        self.version += 1
        return web.json_response(self.scale(request.match_info["name"]))

    def scale(self, name: str) -> dict[str, Any]:
        return {
            "kind": "Scale",
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas[name]},
        }


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[FakeApiServer, KubernetesScaler]]:
    fake = FakeApiServer()
    (tmp_path / "token").write_text("t0ken\n")
    async with TestServer(fake.app) as server:
        scaler = KubernetesScaler(
            PlannerConfig(kubernetes_namespace="ns"),
            url=str(server.make_url("/")),
            token_file=tmp_path / "token",
            ca_file=None,
        )
        yield fake, scaler
        await scaler.close()


async def test_kubernetes_scales_by_the_subresource(
    api: tuple[FakeApiServer, KubernetesScaler],
) -> None:
    fake, scaler = api

    await scaler.scale("decode", 3)

    assert fake.replicas == {"diptych-prefill": 1, "diptych-decode": 3}
    assert await scaler.replicas("decode") == 3


async def test_somebody_elses_change_since_the_decision_is_never_overwritten(
    api: tuple[FakeApiServer, KubernetesScaler],
) -> None:
    fake, scaler = api
    assert await scaler.replicas("decode") == 1
    fake.version += 1

    with pytest.raises(UnavailableError, match="409 the object has been modified"):
        await scaler.scale("decode", 3)
    assert fake.replicas["diptych-decode"] == 1

    await scaler.scale("decode", 3)
    assert fake.replicas["diptych-decode"] == 3


def test_a_pod_is_told_where_the_api_server_is() -> None:
    assert api_server({}) == "https://kubernetes.default.svc"
    told = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert api_server(told) == "https://10.0.0.1:6443"
    assert api_server({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"


async def test_a_refusal_names_the_path_and_the_reason(
    api: tuple[FakeApiServer, KubernetesScaler],
) -> None:
    fake, scaler = api
    fake.refuse = 403

    with pytest.raises(UnavailableError, match=r"deployments/diptych-decode/scale: 403 forbidden"):
        await scaler.scale("decode", 3)


def test_targets_name_any_scalable_kind() -> None:
    path = scale_path("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet/d", "n")

    assert path == "/apis/leaderworkerset.x-k8s.io/v1/namespaces/n/leaderworkersets/d/scale"
    with pytest.raises(ConfigError, match="group/version/kind/name"):
        scale_path("Deployment/d", "n")


async def test_the_loop_grows_a_queueing_pool_through_the_launchers_socket(tmp_path: Path) -> None:
    sizes = {"prefill": 1, "decode": 1}

    async def launcher(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = json.loads(await reader.readline())
        sizes[order["pool"]] = order.get("replicas", sizes[order["pool"]])
        answer = {"pool": order["pool"], "replicas": sizes[order["pool"]]}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    def observe(pool: str) -> PoolLoad:
        return PoolLoad(1, 0, 10 if pool == "prefill" else 0, 0.0)

    async with await asyncio.start_unix_server(launcher, str(tmp_path / "s")):
        loop = PlannerLoop(
            PlannerConfig(max_prefill=2), observe, LocalScaler(str(tmp_path / "s")), SystemClock()
        )
        await loop.decide()

    assert sizes == {"prefill": 2, "decode": 1}


async def test_the_loop_outlives_answers_that_make_no_sense(tmp_path: Path) -> None:
    asked: list[str] = []
    third = asyncio.Event()

    async def launcher(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode())
        writer.write(b'{"pools": "many"}\n')
        await writer.drain()
        writer.close()
        if len(asked) == 3:
            third.set()

    config = PlannerConfig(interval_s=0.001)
    async with await asyncio.start_unix_server(launcher, str(tmp_path / "s")):
        loop = PlannerLoop(
            config,
            lambda pool: PoolLoad(1, 1, 0, 0.0),
            LocalScaler(str(tmp_path / "s")),
            SystemClock(),
        )
        task = asyncio.create_task(loop.run())
        async with asyncio.timeout(60):
            await third.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_launcher_that_is_gone_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be asked"):
        await LocalScaler(str(tmp_path / "none")).scale("decode", 1)
