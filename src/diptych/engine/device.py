"""What depends on the device: which one, which type, which defaults."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.config import GIB, EngineConfig
from diptych.engine.vector_math import settle_vector_math
from diptych.errors import ConfigError, ModelLoadError
from diptych.models.config import ModelConfig
from diptych.models.fp8_scheme import Fp8Scheme, choose_scheme

_DTYPES = ("float32", "bfloat16", "float16")
# major number of the compute capability
_BFLOAT16_SINCE = 8
_ROOMY_BYTES = 70 * GIB
# 8,448 on an H200: a product in tiles of 128 rows by 256 columns then fills the multiprocessors a
# whole number of times for any multiple of 512 columns; 8,192 would leave 3 % of them idle
_TOKENS_PER_MULTIPROCESSOR = 64


def choose_device(name: str) -> torch.device:
    """The device of `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name} was asked for, but torch sees {count} GPUs")
        device = torch.device("cuda", device.index or 0)
    return device


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type to compute in: as asked for; `auto` is the model's on GPUs, float32 on CPUs.

    Raises:
        ModelLoadError: the model's own type is not supported.
        ConfigError: the device has no such type.
    """
    if model.dtype not in _DTYPES:
        raise ModelLoadError(
            f"dtype {model.dtype} of {model.path} is not supported; "
            f"supported are {', '.join(_DTYPES)}"
        )
    if name == "auto":
        name = model.dtype if device.type == "cuda" else "float32"
    if name == "bfloat16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < _BFLOAT16_SINCE:
            raise ConfigError(
                f"{device} has compute capability {major}.{minor} and so no bfloat16 (from "
                f"{_BFLOAT16_SINCE}.0 on); set dtype to float16 or float32"
            )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that keys and values are kept in; `auto` is the type to compute in.

    Raises:
        ConfigError: the GPU has no such type.
    """
    if name == "auto":
        return dtype
    require_e4m3("kv_cache_dtype", name, device)
    return torch.float8_e4m3fn


def choose_fp8(
    quantization: str | None, model: ModelConfig, device: torch.device
) -> Fp8Scheme | None:
    """How weights are e4m3, if they are.

    Raises:
        ConfigError: the GPU has no such type.
        ModelLoadError: the checkpoint is quantised in a way that is not supported.
    """
    scheme = choose_scheme(quantization, model)
    if scheme is not None:
        require_e4m3("quantization", "fp8", device)
    return scheme


def require_e4m3(argument: str, value: str, device: torch.device) -> None:
    """Raise ConfigError on a GPU without e4m3; CPUs emulate it."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigError(
            f"{argument} {value} needs a GPU of compute capability 8.9 or more, not "
            f"{found[0]}.{found[1]} ({torch.cuda.get_device_name(device)})"
        )


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest prompt plus output.

    Raises:
        ConfigError: more was asked for than the model's positions.
    """
    wanted = config.max_model_len or model.max_position
    if wanted > model.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {model.max_position} positions of the model"
        )
    return wanted


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def set_up(config: EngineConfig, device: torch.device) -> None:
    """Make the device current, and give torch its threads and its precision."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    settle_vector_math()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # no TF32: float32 means float32


def with_device_defaults(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Block size and batch limits filled in.

    On a roomy GPU many requests share each reading of the weights: 1,000 requests of 256 tokens in
    and out are done sooner all at once than in four parts.
    """
    block_size, tokens, seqs = 16, 2048, 64
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        block_size, seqs = 64, 1024 if properties.total_memory >= _ROOMY_BYTES else 256
        tokens = _TOKENS_PER_MULTIPROCESSOR * properties.multi_processor_count
    return replace(
        config,
        block_size=config.block_size or block_size,
        max_num_batched_tokens=config.max_num_batched_tokens or tokens,
        max_num_seqs=config.max_num_seqs or seqs,
    )
