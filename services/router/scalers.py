"""Carry out pool sizes: by the launcher on this machine, or by Kubernetes `scale` subresources."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from diptych.config import PlannerConfig
from diptych.errors import ConfigError, DeadlineError, UnavailableError

_DEADLINE_S = 10.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_FIELD_MANAGER = "diptych-planner"


class Scaler(Protocol):
    """Sets the size of a pool (`prefill` or `decode`)."""

    async def replicas(self, pool: str) -> int:
        """Workers asked for now.

        Raises:
            UnavailableError: it cannot be asked.
        """
        ...

    async def scale(self, pool: str, replicas: int) -> None:
        """Ask for this many workers; those too many drain before they end.

        Raises:
            UnavailableError: the order was refused or did not arrive.
        """
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class LocalScaler:
    """Asks the launcher on this machine, over its unix socket."""

    def __init__(self, supervisor: str) -> None:
        self._path = supervisor

    async def replicas(self, pool: str) -> int:
        return int((await self._ask({"pool": pool}))["replicas"])

    async def scale(self, pool: str, replicas: int) -> None:
        await self._ask({"pool": pool, "replicas": replicas})

    async def close(self) -> None:
        return

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    writer.write(json.dumps(order).encode() + b"\n")
                    await writer.drain()
                    answer = json.loads(await reader.readline())
                finally:
                    writer.close()
        except TimeoutError:
            raise DeadlineError(f"the launcher did not answer in {_DEADLINE_S:.0f} s") from None
        except (OSError, ValueError) as error:
            raise UnavailableError(f"the launcher cannot be asked: {error}") from None
        if "error" in answer:
            raise UnavailableError(f"the launcher refused: {answer['error']}")
        return dict(answer)


class KubernetesScaler:
    """GET and PATCH of `scale` subresources, nothing else: a 403 or 404 never widens what is tried.

    `url`, `token_file` and `ca_file` default to those of the pod. The token is read again for every
    call, because the projected file rotates. `scale` is compare-and-swap against the last
    `replicas`: whatever changed the object in between wins, and the next decision starts from it.
    """

    def __init__(
        self,
        config: PlannerConfig,
        *,
        url: str | None = None,
        token_file: Path = _SERVICE_ACCOUNT / "token",
        ca_file: Path | None = _SERVICE_ACCOUNT / "ca.crt",
    ) -> None:
        namespace = config.kubernetes_namespace or _pod_namespace()
        self._paths = {
            "prefill": scale_path(config.prefill_target, namespace),
            "decode": scale_path(config.decode_target, namespace),
        }
        self._url = (url or api_server(os.environ)).rstrip("/")
        self._token_file = token_file
        self._ca_file = ca_file
        self._versions: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def replicas(self, pool: str) -> int:
        scale = await self._call("GET", pool)
        self._versions[pool] = scale["metadata"]["resourceVersion"]
        return int(scale.get("spec", {}).get("replicas", 0))

    async def scale(self, pool: str, replicas: int) -> None:
        if pool not in self._versions:
            await self.replicas(pool)
        version = self._versions.pop(pool)
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._call("PATCH", pool, body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, pool: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        url = f"{self._url}{self._paths[pool]}"
        headers = {"Authorization": f"Bearer {_read(self._token_file)}"}
        if body is not None:
            url += f"?fieldManager={_FIELD_MANAGER}"
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body)
        try:
            async with self._client().request(method, url, data=data, headers=headers) as response:
                text = await response.text()
                if response.status == 200:
                    return dict(json.loads(text))
                raise UnavailableError(
                    f"{method} {self._paths[pool]}: {response.status} {_message(text)}"
                )
        except TimeoutError:
            raise DeadlineError(f"{method} {self._paths[pool]} timed out") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise UnavailableError(f"{method} {self._paths[pool]}: {error}") from None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            context: ssl.SSLContext | bool = True
            if self._ca_file is not None and self._ca_file.exists():
                context = ssl.create_default_context(cafile=str(self._ca_file))
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_DEADLINE_S),
                connector=aiohttp.TCPConnector(ssl=context),
            )
        return self._session


def make_scaler(config: PlannerConfig) -> Scaler:
    """The scaler that the configuration names.

    Raises:
        ConfigError: an unknown one, or a local one outside `diptych up`.
    """
    if config.scaler == "kubernetes":
        return KubernetesScaler(config)
    if config.scaler == "local":
        if not config.supervisor:
            raise ConfigError("the local scaler needs the launcher: use `diptych up --autoscale`")
        return LocalScaler(config.supervisor)
    raise ConfigError(f"scaler must be local or kubernetes, not {config.scaler!r}")


def api_server(environment: Mapping[str, str]) -> str:
    """URL of the API server as a pod is told it; by its name in the cluster's DNS if it is not."""
    host = environment.get("KUBERNETES_SERVICE_HOST")
    if not host:
        return "https://kubernetes.default.svc"
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}"


def scale_path(target: str, namespace: str) -> str:
    """API path of the scale subresource of `group/version/kind/name` (`version/kind/name` in core).

    Raises:
        ConfigError: the target is not of that form.
    """
    parts = target.split("/")
    if len(parts) not in (3, 4) or not all(parts):
        raise ConfigError(f"expected group/version/kind/name, not {target!r}")
    *api, kind, name = parts
    root = "/apis/" if len(api) == 2 else "/api/"
    return f"{root}{'/'.join(api)}/namespaces/{namespace}/{kind.lower()}s/{name}/scale"


def _pod_namespace() -> str:
    file = _SERVICE_ACCOUNT / "namespace"
    if not file.exists():
        raise ConfigError("outside a pod, kubernetes_namespace must be given")
    return _read(file)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read: {error}") from None


def _message(text: str) -> str:
    """The message of a Kubernetes Status, else the start of the body."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
