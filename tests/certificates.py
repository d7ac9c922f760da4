"""Real certificates, by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from diptych.connectors.transports.tcp_wire import TlsFiles


def make_certificates(folder: Path) -> None:
    """An authority, and one certificate of it for both sides."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so there are no certificates")

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(*new, "-keyout", "ca.key", "-out", "authority.pem", "-subj", "/CN=ca", "-days", "2")
    signed = ["-CA", "authority.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    out = ["-keyout", "key.pem", "-out", "certificate.pem", "-subj", "/CN=worker", "-days", "2"]
    openssl(*new, *signed, *out)


def files_of(folder: Path) -> TlsFiles:
    names = ("certificate", "key", "authority")
    return TlsFiles(**{name: folder / f"{name}.pem" for name in names})
