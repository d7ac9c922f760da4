"""Which settings `diptych up` refuses because its processes would not fit together."""

from __future__ import annotations

from diptych.addresses import reachable_address
from diptych.clock import SystemClock
from diptych.config import WorkerConfig
from diptych.config_sources import Settings
from diptych.connectors.checks import checked_transfer, goes_through_store
from diptych.connectors.direct_settings import NAME as DIRECT
from diptych.errors import AddressError, ConfigError
from diptych.services.router.api_keys import ApiKeys


def check_together(settings: Settings, *, aggregated: bool = False) -> None:
    """Settings of the hand-off, one with the others; what the router would refuse later.

    Args:
        aggregated: there is one worker, and no hand-off.

    Raises:
        ConfigError: API keys that cannot be read, a connector of nonsense, router and workers of
            unlike ways, or processes that whoever finds them in Redis could not reach.
    """
    ApiKeys(settings["router"].api_keys, SystemClock())
    _check_reachable(settings, has_store=not aggregated)
    transfer = checked_transfer(settings["engine"].kv_transfer_config)
    if aggregated:
        return
    way, of_workers = settings["router"].handoff, settings["worker"].handoff
    if of_workers not in (way, WorkerConfig().handoff):
        raise ConfigError(
            f"worker.handoff is {of_workers} and router.handoff {way}: set --handoff, which is for "
            "both",
            param="handoff",
        )
    if transfer is None:
        return
    name = transfer.kv_connector
    if way == "direct" and name != DIRECT:
        raise ConfigError(f"--handoff direct needs the {DIRECT}, not {name}", param="handoff")
    if way == "store" and not goes_through_store(transfer):
        raise ConfigError(
            f"--handoff store needs a connector with a store; this {name} has none", param="handoff"
        )


def _check_reachable(settings: Settings, *, has_store: bool) -> None:
    """
    Raises:
        ConfigError: Redis is elsewhere, and what is announced there is of this machine alone.
    """
    url, hosts = settings["redis"].redis, {"WORKER": settings["worker"].host}
    if has_store and settings["router"].handoff != "direct":
        kvstore = settings["kvstore"]
        if kvstore.advertise_address is None:
            hosts["KVSTORE"] = kvstore.host
    local = []
    for section, host in hosts.items():
        try:
            reachable_address(host, 0, None, url)
        except AddressError:
            local.append(section)
    if url is not None and local:
        raise ConfigError(
            "Redis is on another machine, from where nobody could reach what listens on "
            f"{' and '.join(sorted({hosts[section] for section in local}))} here: set "
            f"{' '.join(f'DIPTYCH_{section}_HOST=0.0.0.0' for section in local)}, or to an address "
            "of this machine in the network",
            param="redis",
        )
