"""A hub id is fetched from a hub: here a small server that speaks as much of the protocol as that
takes. The client reads its environment when it is imported, so it runs in a process of its own."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
COMMIT = hashlib.sha1(b"commit").hexdigest()
CODE = """
import sys
from diptych.errors import ModelLoadError
from diptych.models.fetch import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2] or None, progress=False))
except ModelLoadError as error:
    print(f"refused: {error}")
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `directory` as the repository owner/tiny at COMMIT, with the revision `stable`."""

    directory: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        self.asked.append(f"{self.path} {token}")
        names = sorted(path.name for path in self.directory.iterdir())
        if self.path.split("?")[0] == "/api/models/owner/tiny/revision/stable":
            siblings = [{"rfilename": name} for name in names]
            info = {"_id": "1", "id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
            self._answer(json.dumps(info).encode())
        elif self.path.startswith(f"/api/models/owner/tiny/tree/{COMMIT}"):
            self._answer(json.dumps([self._entry(name) for name in names]).encode())
        elif self.path.startswith(f"/owner/tiny/resolve/{COMMIT}/"):
            self._answer((self.directory / self.path.rsplit("/", 1)[1]).read_bytes())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _entry(self, name: str) -> dict[str, object]:
        content = (self.directory / name).read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    source = make_tiny_model(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    handler = type("TinyHub", (Hub,), {"directory": source, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(endpoint: str, home: Path, model: str, revision: str = "") -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", CODE, model, revision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    return done.stdout.strip()


def test_a_hub_id_is_fetched_at_its_revision_with_the_token(hub, tmp_path: Path) -> None:
    endpoint, handler = hub
    directory = Path(resolve(endpoint, tmp_path / "home", "owner/tiny", "stable"))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (handler.directory / name).read_bytes()
    assert not (directory / "pytorch_model.bin").exists()
    assert all(line.endswith("Bearer hf_secret") for line in handler.asked)


def test_a_repository_that_is_not_there_is_named(hub, tmp_path: Path) -> None:
    said = resolve(hub[0], tmp_path / "home", "owner/absent")
    assert said.startswith("refused: owner/absent cannot be fetched from the hub: ")
