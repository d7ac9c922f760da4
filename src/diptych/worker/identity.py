"""Who a worker is."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.errors import ConfigError
from diptych.proto import common_pb2

ROLES = {
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
    "aggregated": common_pb2.ROLE_AGGREGATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker's name, its life, its part, its model and where to reach it."""

    worker_id: str
    incarnation: str
    role: str
    address: str
    admin_address: str
    model: str
    vocab_size: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
