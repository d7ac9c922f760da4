"""What `diptych doctor` asks of the host: packages, GPUs, limits, ports, caches, Redis."""

from __future__ import annotations

import asyncio
import enum
import http.client
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import diptych
from diptych.addresses import check_bindable, reachable_address
from diptych.config import GIB, MIB
from diptych.errors import AddressError, ConfigError, DiptychError

_COMMAND_S = 10.0
_REDIS_S = 3.0
_MIN_SHM_BYTES = 64 * MIB
_MIN_FILES = 4096
_WITHOUT_TRITON = "engines on a GPU need it, those on a CPU do not"


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to look at."""

    redis: str | None = None
    ports: tuple[int, ...] = ()
    host: str = "0.0.0.0"
    transfers: bool = False


def check_versions(options: Options) -> Iterator[Finding]:
    yield Finding("python", Level.OK, f"{platform.python_version()} on {platform.machine()}")
    for package, missing in (
        ("torch", Finding("torch", Level.FAIL, "not installed")),
        ("triton", Finding("triton", Level.WARN, f"not installed: {_WITHOUT_TRITON}")),
        ("grpcio", Finding("grpcio", Level.FAIL, "not installed")),
    ):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield missing
        else:
            yield Finding(package, Level.OK, version)


def check_gpus(options: Options) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Finding("gpus", Level.OK, "none: engines run on the CPU")
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
        yield Finding(f"gpu {index}", Level.OK, text)
    if count > 1:
        yield _peer_access(count)
    if "expandable_segments:true" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        text = "expandable segments make CUDA IPC, and so KV transfers, hundreds of times slower"
        yield Finding("PYTORCH_CUDA_ALLOC_CONF", Level.WARN, text)


def _peer_access(count: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        shown = ", ".join(f"{a}-{b}" for a, b in without[:6])
        return Finding("peer access", Level.WARN, f"none between GPUs {shown}: copies go by host")
    return Finding("peer access", Level.OK, f"all {count} GPUs reach each other")


def check_nvlink(options: Options) -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding("nvlink", Level.OK, "nvidia-smi is not here: no NVIDIA GPU to look at")
        return
    text = _output(["nvidia-smi", "topo", "-m"])
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    links = {cell for row in rows for cell in row[1:] if cell.startswith("NV")}
    if len(rows) < 2:
        yield Finding("nvlink", Level.OK, "one GPU, nothing to link")
    elif links:
        yield Finding("nvlink", Level.OK, f"links {', '.join(sorted(links))} between GPUs")
    else:
        yield Finding("nvlink", Level.WARN, "no NVLink between GPUs: KV goes over PCIe")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True)
    return done.stdout


def check_limits(options: Options) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock", Level.OK, "unlimited")
    else:
        text = f"{soft / MIB:.0f} MiB: RDMA cannot register a KV pool (ulimit -l unlimited)"
        level = Level.WARN if _has_rdma() else Level.OK
        yield Finding("memlock", level, text if _has_rdma() else f"{soft / MIB:.0f} MiB, no RDMA")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = Level.OK if files >= _MIN_FILES else Level.WARN
    text = f"{files}" if files >= _MIN_FILES else f"{files}: many clients need {_MIN_FILES}"
    yield Finding("open files", level, text)


def _has_rdma() -> bool:
    return any(Path("/sys/class/infiniband").glob("*"))


def check_shared_memory(options: Options) -> Iterator[Finding]:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", Level.WARN, f"missing: {error.strerror}")
    else:
        size = status.f_frsize * status.f_blocks
        enough = size >= _MIN_SHM_BYTES
        text = f"{size / GIB:.2f} GiB" + ("" if enough else ": NCCL and UCX need more")
        yield Finding("/dev/shm", Level.OK if enough else Level.WARN, text)
    try:
        os.close(os.memfd_create("diptych-doctor", os.MFD_ALLOW_SEALING))
    except OSError as error:
        yield Finding("memfd", Level.FAIL, f"cannot be made: {error.strerror}")
    else:
        yield Finding("memfd", Level.OK, "KV pools of one host can be shared")


def _is_ours(host: str, port: int) -> bool:
    """Whether a router of Diptych answers there, as far as it says so without a key."""
    # what listens there is on this machine: no proxy that the environment may name
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    place = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    shown = f"[{place}]" if ":" in place else place
    for path, sign in (("/v1/models", '"diptych"'), ("/version", f'"{diptych.__version__}"')):
        try:
            with opener.open(f"http://{shown}:{port}{path}", timeout=2.0) as answer:
                if sign.encode() in answer.read(65_536):
                    return True
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException):
            return False
    return False


def check_ports(options: Options) -> Iterator[Finding]:
    for port in options.ports:
        try:
            check_bindable(options.host, port)
        except ConfigError as error:
            if _is_ours(options.host, port):
                yield Finding(f"port {port}", Level.OK, "a running Diptych has it")
            else:
                yield Finding(f"port {port}", Level.FAIL, error.message)
        else:
            yield Finding(f"port {port}", Level.OK, "free")
    try:
        address = reachable_address(options.host, 0, None, options.redis)
    except AddressError as error:
        level = Level.WARN if options.redis is None else Level.FAIL
        yield Finding("address", level, error.message)
    else:
        yield Finding("address", Level.OK, f"others reach this machine at {address[:-2]}")


def check_kernel_cache(options: Options) -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        text = "none: without triton no kernel is compiled, and on a CPU none is needed"
        yield Finding("kernel cache", Level.OK, text)
        return
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # a trial: root may pass every other test
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}): each start compiles all kernels"
        yield Finding("kernel cache", Level.WARN, text)
        return
    entries = sum(1 for _ in folder.iterdir()) if folder.exists() else 0
    yield Finding("kernel cache", Level.OK, f"{folder}, {entries} entries")


def check_redis(options: Options) -> Iterator[Finding]:
    if options.redis is None:
        yield Finding("redis", Level.OK, "none was named (--redis); `diptych up` starts its own")
        return
    try:
        version = asyncio.run(_redis_version(options.redis))
    except (DiptychError, OSError, TimeoutError) as error:
        yield Finding("redis", Level.FAIL, str(error) or f"no answer within {_REDIS_S:g} s")
        return
    new_enough = tuple(map(int, version.split(".")[:2])) >= (6, 2)
    level = Level.OK if new_enough else Level.FAIL
    yield Finding("redis", level, f"server {version}" + ("" if new_enough else ": 6.2 is needed"))


async def _redis_version(url: str) -> str:
    from redis.exceptions import RedisError

    from diptych.errors import UnavailableError
    from diptych.redis_url import open_redis

    opened = open_redis(url, _REDIS_S)
    try:
        async with asyncio.timeout(_REDIS_S):
            information = await opened.redis.info("server")
    except RedisError as error:
        raise UnavailableError(f"Redis does not answer: {error}") from error
    finally:
        await opened.close()
    return str(information["redis_version"])


CHECKS = (
    check_versions,
    check_gpus,
    check_nvlink,
    check_limits,
    check_shared_memory,
    check_ports,
    check_kernel_cache,
    check_redis,
)
