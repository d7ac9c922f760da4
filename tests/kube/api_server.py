"""A real Kubernetes API server with its etcd, on loopback: no nodes, no controllers, RBAC on."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.launcher.child import free_ports

_START_S = 90.0


class Refused(Exception):
    """The server answered with another status than 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


@dataclass(frozen=True)
class ApiServer:
    """Where it listens, and an administrator's token and kubeconfig."""

    url: str
    ca_file: Path
    admin_token: str
    kubeconfig: Path

    def call(
        self, method: str, path: str, body: Any = None, *, token: str = "", patch: bool = False
    ) -> dict[str, Any]:
        """One request; as the administrator unless a token is given.

        Raises:
            Refused: the status is not 2xx.
        """
        kind = "application/merge-patch+json" if patch else "application/json"
        headers = {"Authorization": f"Bearer {token or self.admin_token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(self.ca_file))
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
            raise Refused(error.code, text) from None

    def token_of(self, namespace: str, account: str) -> str:
        """A fresh token of a ServiceAccount, as the kubelet would mount it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.call("POST", path, body)["status"]["token"])


def missing_assets() -> str:
    """Why no server can be started here; empty if one can."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return "KUBEBUILDER_ASSETS names no directory with etcd and kube-apiserver"
    lacking = [n for n in ("etcd", "kube-apiserver") if not os.access(Path(folder, n), os.X_OK)]
    return f"KUBEBUILDER_ASSETS lacks {' and '.join(lacking)}" if lacking else ""


@contextmanager
def running_api_server(folder: Path) -> Iterator[ApiServer]:
    """Start both; logs and certificates lie in `folder`."""
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    etcd_port, peer_port, port = free_ports(3)
    etcd_url = f"http://127.0.0.1:{etcd_port}"
    (folder / "tokens.csv").write_text('admin-token,admin,admin,"system:masters"\n')
    server = ApiServer(
        url=f"https://127.0.0.1:{port}",
        ca_file=folder / "certs" / "apiserver.crt",
        admin_token="admin-token",
        kubeconfig=folder / "kubeconfig",
    )
    commands = {
        "etcd": [
            *(str(assets / "etcd"), "--data-dir", str(folder / "etcd")),
            *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer_port}"),
        ],
        "kube-apiserver": _api_server_command(assets, folder, etcd_url, port),
    }
    processes = [_start(folder, name, command) for name, command in commands.items()]
    try:
        _wait_ready(server, processes, folder)
        server.kubeconfig.write_text(_kubeconfig(server))
        yield server
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _api_server_command(assets: Path, folder: Path, etcd_url: str, port: int) -> list[str]:
    certs = folder / "certs"
    return [
        str(assets / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={certs}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder / 'tokens.csv'}",
        # the server's own key, which it makes first, signs the accounts' tokens too
        f"--service-account-key-file={certs / 'apiserver.key'}",
        f"--service-account-signing-key-file={certs / 'apiserver.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        # no controller makes the default account that this plugin would ask for
        "--disable-admission-plugins=ServiceAccount",
        "--endpoint-reconciler-type=none",
    ]


def _start(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def _wait_ready(server: ApiServer, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    reason = ""
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                raise AssertionError(f"{process.args} ended; see the logs in {folder}")
        try:
            # roles are made after the server has become ready
            server.call("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/admin")
            return
        except (Refused, OSError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise AssertionError(f"the API server is not ready: {reason}")


def _kubeconfig(server: ApiServer) -> str:
    cluster = {"server": server.url, "certificate-authority": str(server.ca_file)}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": server.admin_token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
    )
