"""Typed configuration: one frozen dataclass per concern, each default written once.

Values come from flags, the environment and a YAML file, in that order of precedence (`load`).
Derived values are properties. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diptych.config_checks import (
    check_address,
    check_not_negative,
    check_one_of,
    check_ports,
    check_positive,
)
from diptych.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20
HANDOFFS = ("auto", "direct", "store")
TRANSPORTS = ("auto", "cuda_ipc", "nixl", "shm", "tcp", "grpc")


def _flag(default: Any, text: str) -> Any:
    """A field whose help text is written beside its default."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Which connector moves KV, and this engine's part in it."""

    kv_connector: str | None = _flag(
        None, "SharedStorageConnector, StoreConnector or DirectConnector"
    )
    kv_role: str = _flag("kv_both", "kv_producer, kv_consumer or kv_both")
    engine_id: str | None = _flag(None, "name of this engine; drawn if absent")
    kv_connector_extra_config: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "settings of the connector, a JSON object"}
    )

    def __post_init__(self) -> None:
        if self.kv_role not in ("kv_producer", "kv_consumer", "kv_both"):
            raise ConfigError(
                f"kv_role must be kv_producer, kv_consumer or kv_both, not {self.kv_role!r}"
            )

    @property
    def is_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine."""

    model: str = _flag("smollm2", "smollm2, a directory, a hub id, or a .gguf file")
    revision: str | None = _flag(None, "revision of a hub id")
    served_model_name: str | None = _flag(None, "name in the API; the model's name if absent")
    dtype: str = _flag(
        "auto", "auto (the model's on GPUs, float32 on CPUs), float32, bfloat16, float16"
    )
    quantization: str | None = _flag(
        None, "fp8 rounds weights to 8 bits when loaded; checkpoints of fp8 need no flag"
    )
    kv_cache_dtype: str = _flag(
        "auto", "type that KV is kept in: auto (as dtype), or fp8 = fp8_e4m3 (half of bfloat16)"
    )
    device: str = _flag("auto", "auto, cpu or cuda")
    load_format: str = _flag("auto", "auto or dummy (random weights)")
    seed: int = _flag(0, "seed of random weights and of requests that bring none, offline")
    max_model_len: int | None = _flag(None, "longest prompt plus output; the model's if absent")
    block_size: int | None = _flag(None, "tokens per KV block; 64 on GPUs, 16 on CPUs if absent")
    num_kv_blocks: int | None = _flag(None, "KV blocks; sized by the budget if absent")
    gpu_memory_utilization: float = _flag(0.9, "share of GPU memory that the engine may use")
    cpu_kv_cache_bytes: int = _flag(512 * MIB, "KV cache budget on a CPU")
    max_num_batched_tokens: int | None = _flag(
        None, "tokens per step; 2048 on CPUs, 64 for each multiprocessor of a GPU (H200: 8448)"
    )
    max_num_seqs: int | None = _flag(
        None, "requests per step; 64 on CPUs, 256 on GPUs, 1024 on those of 70 GiB or more"
    )
    long_prefill_token_threshold: int = _flag(
        0, "most prompt tokens of one request per step; 0: no limit"
    )
    reserve_output: bool = _flag(
        True, "admit a request only where what all are expected to write will fit"
    )
    scheduling_policy: str = _flag("fcfs", "fcfs or priority (lower first)")
    enable_prefix_caching: bool = _flag(True, "reuse KV of equal prefixes")
    attention_backend: str = _flag(
        "auto", "auto, torch, triton, or fa3 (needs diptych[fa3] and a Hopper GPU)"
    )
    enforce_eager: bool = _flag(False, "run decode steps without CUDA graphs")
    async_scheduling: bool | None = _flag(
        None, "plan a step while the one before runs; on with CUDA graphs if absent"
    )
    max_logprobs: int = _flag(20, "most logprobs a request may ask for")
    max_num_queued_reqs: int = _flag(1024, "waiting requests beyond which new ones are refused")
    num_threads: int | None = _flag(None, "CPU threads of torch; set by the launcher")
    kv_transfer_config: KVTransferConfig | None = None

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))
        if self.quantization is not None:
            check_one_of("quantization", self.quantization, ("fp8",))
        check_one_of("load_format", self.load_format, ("auto", "dummy"))
        check_one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        backends = ("auto", "torch", "triton", "fa3")
        check_one_of("attention_backend", self.attention_backend, backends)
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("cuda:"):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if self.block_size is not None and (self.block_size < 16 or self.block_size % 16):
            raise ConfigError(f"block_size must be a multiple of 16, not {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization must be in (0, 1]")
        if not self.model:
            raise ConfigError("model must not be empty")
        check_positive(self, "max_model_len", "num_kv_blocks", "cpu_kv_cache_bytes", "num_threads")
        check_positive(self, "max_num_batched_tokens", "max_num_seqs", "max_num_queued_reqs")
        check_not_negative(self, "long_prefill_token_threshold", "max_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """The directory and registry."""

    redis: str | None = _flag(
        None, "redis:// URL (any server from 6.2), or redis+sentinel://HOST:PORT,.../SERVICE"
    )
    registry_prefix: str = _flag("diptych", "prefix of all keys")
    heartbeat_s: float = _flag(1.0, "seconds between heartbeats")
    liveness_s: float = _flag(5.0, "seconds after which a silent worker is gone")

    def __post_init__(self) -> None:
        check_positive(self, "heartbeat_s", "liveness_s")
        if self.liveness_s <= self.heartbeat_s:
            raise ConfigError(
                f"liveness_s must be above heartbeat_s, not {self.liveness_s} and "
                f"{self.heartbeat_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One prefill, decode or aggregated worker process."""

    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(0, "gRPC port; 0 takes a free one")
    admin_port: int = _flag(0, "port of /livez /readyz /metrics; 0 takes a free one")
    advertise_address: str | None = _flag(
        None, "host:port that others reach it at; host:port if absent"
    )
    worker_id: str | None = _flag(None, "name; drawn if absent")
    drain_s: float = _flag(30.0, "seconds that SIGTERM waits for running requests")
    stream_grace_s: float = _flag(5.0, "seconds after which requests of a gone router are aborted")
    max_frames_queued: int = _flag(1024, "frames kept for one router before it is dropped")
    ticket_keys: str | None = _flag(
        None, "file with ticket signing keys; none: tickets are not verified"
    )
    kvstore: str | None = _flag(
        None, "host:port of the KV store's nodes, comma-separated; from the registry if absent"
    )
    read_store: bool = _flag(True, "load prefixes from the KV store where that is cheaper")
    store_decoded: bool = _flag(
        False, "store the KV of outputs too, so that a conversation's next turn hits"
    )
    handoff: str = _flag(
        "auto",
        "how KV may move: auto (from worker to worker and through the store), direct (a store only "
        "where --kvstore names one), or store",
    )
    kv_transports: str = _flag(
        "auto",
        "what carries KV from worker to worker, preferred first: cuda_ipc, nixl, shm, tcp, grpc",
    )
    kv_lease_s: float = _flag(
        30.0, "seconds that prefill keeps KV after the last sign of the worker that reads it"
    )
    kv_tls_certificate: str | None = _flag(
        None, "PEM certificate under which KV travels; with a key and an authority, all or none"
    )
    kv_tls_key: str | None = _flag(None, "PEM key of that certificate")
    kv_tls_authority: str | None = _flag(
        None, "PEM authority that the certificates of other workers must be of"
    )
    kv_tls_name: str | None = _flag(
        None, "name that the certificates of other workers must bear; their address if absent"
    )
    verify_kv: bool | None = _flag(
        None,
        "compare checksums of KV that came straight from another worker; if absent, not of what "
        "was read over NVLink, PCIe or RDMA",
    )

    def __post_init__(self) -> None:
        check_one_of("handoff", self.handoff, HANDOFFS)
        names = [name.strip() for name in self.kv_transports.split(",") if name.strip()]
        for name in names or [""]:
            check_one_of("kv_transports", name, TRANSPORTS)
        check_ports(self, "port", "admin_port")
        check_address("advertise_address", self.advertise_address)
        for address in (self.kvstore or "").split(",") if self.kvstore is not None else ():
            check_address("kvstore", address.strip())
        files = ("kv_tls_certificate", "kv_tls_key", "kv_tls_authority")
        missing = [name for name in files if not getattr(self, name)]
        if missing and (len(missing) < len(files) or self.kv_tls_name):
            raise ConfigError(f"{', '.join(files)} come together; {', '.join(missing)} is missing")
        check_not_negative(self, "drain_s", "stream_grace_s")
        check_positive(self, "max_frames_queued", "kv_lease_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig:
    """One store node."""

    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(0, "gRPC port; 0 takes a free one")
    stream_port: int = _flag(0, "port of the byte stream; 0 takes a free one")
    admin_port: int = _flag(0, "port of /livez /readyz /metrics; 0 takes a free one")
    advertise_address: str | None = _flag(None, "host:port that others reach it at")
    pool_bytes: int = _flag(1 * GIB, "size of the DRAM pool")
    eviction_high_watermark: float = _flag(0.90, "share of the pool at which eviction starts")
    eviction_step: float = _flag(0.05, "share of the pool that one eviction frees")
    put_ttl_s: float = _flag(30.0, "seconds after which an unfinished put is reclaimed")
    lease_s: float = _flag(10.0, "least lease of a Get, before its share for the bytes")
    tenant_quota: float = _flag(0.5, "share of a tier that one API key's KV may take; 1: all")
    hot_reads_per_s: float = _flag(
        20.0, "reads of one object for each node that should have a copy; 0: no copies"
    )
    node_id: str | None = _flag(None, "name that outlives restarts; that of the disk, or drawn")
    ssd_path: str | None = _flag(None, "folder of the disk tier; none: memory only")
    ssd_bytes: int = _flag(16 * GIB, "most bytes of the disk tier")
    ssd_min_uses: int = _flag(2, "uses after which an object goes to disk; its put is the first")
    drain_s: float = _flag(
        5.0, "seconds that SIGTERM gives readers to end, and the disk to take what memory has"
    )

    def __post_init__(self) -> None:
        if self.pool_bytes < 1 * MIB:
            raise ConfigError(f"pool_bytes must be at least {MIB}, not {self.pool_bytes}")
        if not 0.0 < self.eviction_step < self.eviction_high_watermark <= 1.0:
            raise ConfigError(
                "eviction needs 0 < eviction_step < eviction_high_watermark <= 1, not "
                f"{self.eviction_step} and {self.eviction_high_watermark}"
            )
        if self.ssd_path == "":
            raise ConfigError("ssd_path must not be empty")
        if not 0.0 < self.tenant_quota <= 1.0:
            raise ConfigError(f"tenant_quota must be in (0, 1], not {self.tenant_quota}")
        check_positive(self, "put_ttl_s", "lease_s", "ssd_bytes", "ssd_min_uses")
        check_not_negative(self, "hot_reads_per_s", "drain_s")
        check_ports(self, "port", "stream_port", "admin_port")
        check_address("advertise_address", self.advertise_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The front door."""

    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(8000, "port of the OpenAI HTTP API")
    grpc_port: int = _flag(0, "port of the gRPC Inference API; 0 takes a free one")
    admin_port: int = _flag(0, "port of /livez /readyz /metrics; 0 takes a free one")
    workers: list[str] = field(
        default_factory=list,
        metadata={"help": "host:port of workers; from the registry if absent"},
    )
    handoff: str = _flag(
        "auto",
        "how KV moves: auto (from memory to memory where a test of it passed, else through the "
        "store), direct, or store",
    )
    max_body_bytes: int = _flag(4 * MIB, "largest HTTP body")
    max_in_flight: int = _flag(2048, "requests beyond which new ones get 429")
    request_timeout_s: float = _flag(600.0, "deadline of a request")
    first_token_timeout_s: float = _flag(120.0, "seconds to token 1 before another worker is tried")
    handoff_timeout_s: float = _flag(
        30.0,
        "seconds from token 1 until the prompt's KV is on its way, before another way is tried",
    )
    drain_s: float = _flag(30.0, "seconds that SIGTERM waits for requests under way")
    ticket_keys: str | None = _flag(None, "file with ticket signing keys; drawn if absent")
    api_keys: str | None = _flag(
        None, "file with API keys, one `name:key` a line; none: no keys needed"
    )

    def __post_init__(self) -> None:
        check_ports(self, "port", "grpc_port", "admin_port")
        check_one_of("handoff", self.handoff, HANDOFFS)
        check_positive(self, "max_body_bytes", "max_in_flight", "request_timeout_s")
        check_positive(self, "first_token_timeout_s", "handoff_timeout_s")
        check_not_negative(self, "drain_s")
        for address in self.workers:
            check_address("workers", address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The autoscaler, first form."""

    autoscale: bool = _flag(False, "whether the router sizes the pools")
    scaler: str = _flag("local", "local (processes) or kubernetes (scale subresource)")
    min_prefill: int = _flag(1, "fewest prefill workers")
    max_prefill: int = _flag(1, "most prefill workers")
    min_decode: int = _flag(1, "fewest decode workers")
    max_decode: int = _flag(1, "most decode workers")
    worker_budget: int = _flag(8, "most workers in both pools together")
    interval_s: float = _flag(5.0, "seconds between decisions")
    cooldown_s: float = _flag(30.0, "seconds after a change before the pool may shrink")
    queue_high: float = _flag(4.0, "waiting requests per worker at which a pool grows")
    queue_low: float = _flag(0.5, "waiting requests per worker under which a pool may shrink")
    kv_high: float = _flag(0.85, "KV use at which the decode pool grows")
    kv_low: float = _flag(0.40, "KV use under which the decode pool may shrink")
    kubernetes_namespace: str | None = _flag(None, "namespace; the pod's own if absent")
    pending_timeout_s: float = _flag(600.0, "seconds after which a starting worker is not counted")
    supervisor: str | None = _flag(None, "unix socket of the launcher that starts local workers")
    prefill_target: str = _flag(
        "apps/v1/Deployment/diptych-prefill", "group/version/kind/name to scale"
    )
    decode_target: str = _flag(
        "apps/v1/Deployment/diptych-decode", "group/version/kind/name to scale"
    )

    def __post_init__(self) -> None:
        check_one_of("scaler", self.scaler, ("local", "kubernetes"))
        check_not_negative(self, "min_prefill", "min_decode", "cooldown_s", "queue_low", "kv_low")
        check_positive(self, "interval_s", "pending_timeout_s", "queue_high", "kv_high")
        for pool in ("prefill", "decode"):
            low, high = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            if low > high:
                raise ConfigError(f"min_{pool} is {low}, above max_{pool}, which is {high}")
        if self.worker_budget < max(1, self.min_prefill + self.min_decode):
            raise ConfigError(
                f"worker_budget must hold min_prefill and min_decode, not {self.worker_budget}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What `diptych up` starts on one machine."""

    prefill: int = _flag(1, "prefill workers")
    decode: int = _flag(1, "decode workers")
    ready_timeout_s: float = _flag(300.0, "seconds until all must be ready")
    stop_timeout_s: float = _flag(10.0, "seconds that a stop waits before it kills")
    log_dir: str | None = _flag(None, "keeps the services' logs there")

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ConfigError(
                "up needs at least one prefill and one decode worker; for one that does both, "
                "use `diptych serve`"
            )
        check_positive(self, "ready_timeout_s")
        check_not_negative(self, "stop_timeout_s")
