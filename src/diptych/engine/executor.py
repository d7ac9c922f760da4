"""One engine on one device: load the model, size the KV cache, warm up, run steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from diptych.config import GIB, EngineConfig
from diptych.connectors.base import KVConnectorWorker, KVLayout
from diptych.engine.captured_decode import CapturedDecode, capture_decode
from diptych.engine.captured_mixed import CapturedMixed, capture_mixed
from diptych.engine.device import (
    choose_device,
    choose_dtype,
    choose_fp8,
    choose_kv_dtype,
    choose_max_model_len,
    dtype_name,
    set_up,
    with_device_defaults,
)
from diptych.engine.graphs import GraphPool, batch_sizes, context_lengths, graph_bytes, mixed_sizes
from diptych.engine.input_batch import InputBatch
from diptych.engine.kv_cache import (
    allocate,
    allocate_shared,
    cpu_kv_bytes,
    gpu_kv_bytes,
    num_kv_blocks,
)
from diptych.engine.runner import ModelRunner
from diptych.engine.sampler import Sampler
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput, StepHandle
from diptych.engine.stopwatch import Stopwatch
from diptych.engine.warm_up import (
    Shape,
    forward_memory,
    peak_memory,
    serving_shapes,
    warm_up,
)
from diptych.errors import ConfigError, EngineError, ModelLoadError
from diptych.kernels.attention_spec import AttentionSpec
from diptych.kernels.dispatch import Ops, select_ops
from diptych.models.config import ModelConfig
from diptych.models.fetch import resolve_model
from diptych.models.llama import Decoder
from diptych.models.loader import DummyWeights, SafetensorsWeights, weight_files
from diptych.models.manifest import kv_namespace

_log = logging.getLogger(__name__)

# what a step needs is seen from two layers as well as from all
_TRIED_LAYERS = 2


class UniprocExecutor:
    """`engine.step.Executor` in this process.

    Raises:
        ModelLoadError: the model is missing, damaged or not supported.
        ConfigError: the device is absent, or the KV cache does not fit it (with the arithmetic).
    """

    def __init__(self, config: EngineConfig, connector: KVConnectorWorker | None = None) -> None:
        self._watch = Stopwatch()
        self._connector = connector
        self._device = choose_device(config.device)
        set_up(config, self._device)
        self.model_config = ModelConfig.from_directory(resolve_model(config.model, config.revision))
        self.dtype = choose_dtype(config.dtype, self.model_config, self._device)
        self._kv_dtype = choose_kv_dtype(config.kv_cache_dtype, self.dtype, self._device)
        self._fp8 = choose_fp8(config.quantization, self.model_config, self._device)
        self.max_model_len = choose_max_model_len(config, self.model_config)
        self._config = replace(
            with_device_defaults(config, self._device), max_model_len=self.max_model_len
        )
        self._namespace = self._digest()
        ops = select_ops(self._device, config.attention_backend, self._attention_spec())
        on_gpu = self._device.type == "cuda"
        self._captures = on_gpu and ops.capturable and not config.enforce_eager
        if config.async_scheduling is None:
            self._config = replace(self._config, async_scheduling=self._captures)
        with self._watch.stage("weights"):
            model = self._load_model(ops)
        # before the cache is sized, so that its rows on the device count
        batch = self._make_batch()
        with self._watch.stage("sizing"):
            sampler = Sampler(ops, batch.sampling)
            self._layout = self._size_kv_cache(model, sampler)
        self._runner: ModelRunner | None = self._make_runner(model, ops, batch, sampler)
        _log.info(
            "loaded %s (%s) on %s in %s: %d KV blocks of %d tokens (%s)",
            self.model_config.path.name,
            dtype_name(self.dtype),
            self._device,
            self._watch,
            self._layout.num_blocks,
            self._layout.block_size,
            self._layout.dtype,
        )

    @property
    def config(self) -> EngineConfig:
        """The configuration, with what depends on device and model filled in."""
        return self._config

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds of each stage of the start, in their order."""
        return dict(self._watch.seconds)

    @property
    def kv_layout(self) -> KVLayout:
        return self._layout

    @property
    def kv_namespace(self) -> bytes:
        return self._namespace

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.submit_step(step).result()

    def submit_step(self, step: SchedulerOutput) -> StepHandle:
        if self._runner is None:
            raise EngineError("the executor is shut down")
        return self._runner.submit_step(step)

    def shutdown(self) -> None:
        if self._runner is None:
            return
        self._runner = None
        if self._connector is not None:
            self._connector.shutdown()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _digest(self) -> bytes:
        dummy = self._config.load_format == "dummy"
        return kv_namespace(
            self.model_config,
            [] if dummy else weight_files(self.model_config.path),
            dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(self._kv_dtype),
            weights=str(self._fp8),
            # devices draw other numbers from one seed
            seed=f"{self._config.seed} on {self._device.type}" if dummy else None,
        )

    def _attention_spec(self) -> AttentionSpec:
        config = self.model_config
        return AttentionSpec(
            dtype=self.dtype,
            kv_dtype=self._kv_dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._config.block_size or 16,
            sliding_window=config.sliding_window,
        )

    def _load_model(self, ops: Ops) -> Decoder:
        config, device = self.model_config, self._device
        try:
            if self._config.load_format == "dummy":
                fp8 = None if self._fp8 is None else replace(self._fp8, stored=False)
                seed, biases = self._config.seed, config.attention_bias
                dummy = DummyWeights(self.dtype, device, seed, biases, fp8)
                return Decoder(config, dummy, ops, self.max_model_len, device)
            with SafetensorsWeights(config.path, self.dtype, device, self._fp8) as weights:
                return Decoder(config, weights, ops, self.max_model_len, device)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or _says_full(error):
                raise ModelLoadError(
                    f"the weights of {config.path.name} do not fit {device}: {error}"
                ) from error
            raise

    def _size_kv_cache(self, model: Decoder, sampler: Sampler) -> KVLayout:
        config = self.model_config
        layout = KVLayout(
            num_blocks=1,
            num_kv_heads=config.num_kv_heads,
            num_layers=config.num_layers,
            block_size=self._config.block_size or 16,
            head_dim=config.head_dim,
            dtype=dtype_name(self._kv_dtype),
        )
        if self._config.num_kv_blocks is not None:
            budget = (0, "")
        elif self._device.type == "cuda":
            used = self._gpu_bytes(model, sampler, layout)
            budget = gpu_kv_bytes(self._config, self._device, used)
        else:
            budget = cpu_kv_bytes(self._config)
        count = num_kv_blocks(self._config, layout, self.max_model_len, *budget)
        return replace(layout, num_blocks=count)

    def _gpu_bytes(self, model: Decoder, sampler: Sampler, layout: KVLayout) -> int:
        """What weights, activations and graphs take at their peak."""
        sized = (model, sampler, layout, self._config, self.max_model_len, self._device)
        fits = self._refusing("max_num_batched_tokens or max_num_seqs")
        with fits, model.only_first_layers(_TRIED_LAYERS):
            if not self._captures:
                return peak_memory(*sized)
            return peak_memory(*sized) + self._graph_bytes(model, sampler, layout)

    def _graph_bytes(self, model: Decoder, sampler: Sampler, layout: KVLayout) -> int:
        """What graphs take, and the steps in them."""
        most_seqs, most_tokens = self._limits
        shapes = [Shape(most_seqs, 1, self.max_model_len)]
        mixed = mixed_sizes(most_seqs, min(most_tokens, self.max_model_len))
        if mixed:
            largest, most = max(map(sum, mixed)), self.max_model_len
            shapes.append(Shape(-(-largest // most), min(largest, most), most))
        num_contexts = len(context_lengths(self.max_model_len))
        num_graphs = (len(batch_sizes(most_seqs)) + len(mixed)) * num_contexts
        memory = sum(
            forward_memory(model, sampler, layout, shape, self._device) for shape in shapes
        )
        return graph_bytes(num_graphs, memory)

    @property
    def _limits(self) -> tuple[int, int]:
        """Sequences and tokens of a step at most."""
        return self._config.max_num_seqs or 1, self._config.max_num_batched_tokens or 1

    def _make_batch(self) -> InputBatch:
        return InputBatch(
            self._limits[0],
            self.max_model_len,
            self._config.block_size or 16,
            self.model_config.vocab_size,
            self._device,
        )

    def _make_runner(
        self, model: Decoder, ops: Ops, batch: InputBatch, sampler: Sampler
    ) -> ModelRunner:
        if self._connector is None:
            kv_cache = allocate(self._layout, self._device)
        else:
            kv_cache, self._layout = allocate_shared(self._layout, self._device)
        with self._refusing("gpu_memory_utilization"):
            with self._watch.stage("warm-up"), model.only_first_layers(_TRIED_LAYERS):
                warm_up(model, sampler, kv_cache, self._layout, self._warm_up_shapes())
            captured: tuple[CapturedDecode | None, CapturedMixed | None] = (None, None)
            if self._captures:
                captured = self._capture(model, ops, kv_cache, batch, sampler)
        return ModelRunner(
            model, sampler, kv_cache, self._layout, batch, self._connector, *captured
        )

    def _warm_up_shapes(self) -> list[Shape]:
        """On a CPU nothing is compiled."""
        if self._device.type == "cpu":
            return [Shape(1, count, count) for count in (1, 2) if count <= self.max_model_len]
        return serving_shapes(*self._limits, self.max_model_len)

    @contextmanager
    def _refusing(self, settings: str) -> Iterator[None]:
        """Running out of memory is a refusal of settings that do not fit."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            held = torch.cuda.memory_allocated(self._device) / GIB
            raise ConfigError(
                f"{self.model_config.path.name} loads, but a step of "
                f"{self._config.max_num_batched_tokens} tokens and {self._config.max_num_seqs} "
                f"requests does not fit {self._device} beside {held:.1f} GiB that are held: "
                f"{error}; lower {settings}"
            ) from error

    def _capture(
        self, model: Decoder, ops: Ops, kv_cache: Tensor, batch: InputBatch, sampler: Sampler
    ) -> tuple[CapturedDecode, CapturedMixed | None]:
        trial = partial(model.only_first_layers, _TRIED_LAYERS)
        capture, max_model_len = GraphPool(self._device, trial), self.max_model_len
        with self._watch.stage("graphs"):
            decode = capture_decode(
                model,
                ops,
                kv_cache,
                batch,
                sampler,
                vocab_size=self.model_config.vocab_size,
                max_model_len=max_model_len,
                capture=capture,
            )
            mixed = None
            if ops.prefill_capturable:
                mixed = capture_mixed(
                    model,
                    ops,
                    kv_cache,
                    batch,
                    sampler,
                    decode.step.logits,
                    max_num_tokens=min(self._limits[1], max_model_len),
                    max_model_len=max_model_len,
                    capture=capture,
                )
        torch.cuda.empty_cache()
        return decode, mixed


def _says_full(error: RuntimeError) -> bool:
    """Whether memory ran out, on a CPU or in pinning, for which torch has no class."""
    return any(text in str(error) for text in ("allocate memory", "out of memory"))
