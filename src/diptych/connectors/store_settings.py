"""The StoreConnector's settings, as `kv_connector_extra_config` carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.config import RedisConfig
from diptych.config_checks import check_one_of
from diptych.connectors.settings import fields_of
from diptych.errors import ConfigError

if TYPE_CHECKING:
    from diptych.connectors.store_cluster import StoreCluster, StoreNodes

NAME = "StoreConnector"

_FIRST_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where the store is, and how it is used beyond hand-offs.

    `kvstore`: addresses, comma-separated; or the registry of the fields after it tells the nodes.
    `transport`: as `StoreClient`'s.
    """

    kvstore: str = ""
    redis: str = ""
    registry_prefix: str = "diptych"
    heartbeat_s: float = 1.0
    liveness_s: float = 5.0
    read_prefix: bool = True
    write_through: bool = True
    store_decoded: bool = False
    lookup_timeout_s: float = 0.1
    transport: str = "auto"

    def __post_init__(self) -> None:
        if not (self.kvstore or self.redis):
            raise ConfigError(
                "StoreConnector needs kv_connector_extra_config['kvstore' or 'redis']"
            )
        check_one_of("transport", self.transport, ("auto", "memory", "stream"))

    @classmethod
    def of(cls, settings: dict[str, Any]) -> StoreSettings:
        """Those of a connector's settings that are the store's.

        Raises:
            ConfigError: one has the wrong type, or there is no place.
        """
        return cls(**fields_of(cls, settings))

    def open(self, *, timeout_s: float) -> StoreCluster:
        """A client of the store; it connects when it is used."""
        from diptych.connectors.store_cluster import StoreCluster  # brings gRPC

        return StoreCluster(self._nodes(), timeout_s=timeout_s, transport=self.transport)

    def _nodes(self) -> StoreNodes:
        from diptych.connectors.store_cluster import FixedNodes

        if self.kvstore:
            return FixedNodes(address.strip() for address in self.kvstore.split(","))
        from diptych.connectors.store_membership import RegistryNodes  # needs the Redis client

        nodes = RegistryNodes(
            RedisConfig(
                redis=self.redis,
                registry_prefix=self.registry_prefix,
                heartbeat_s=self.heartbeat_s,
                liveness_s=self.liveness_s,
            )
        )
        nodes.wait(_FIRST_ANSWER_S)
        return nodes
