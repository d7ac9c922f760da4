"""Which settings `diptych up` refuses because its processes would not fit together."""

from __future__ import annotations

from diptych.config import WorkerConfig
from diptych.config_sources import Settings
from diptych.connectors.checks import checked_transfer, goes_through_store
from diptych.connectors.direct_settings import NAME as DIRECT
from diptych.errors import ConfigError


def check_together(settings: Settings, *, aggregated: bool = False) -> None:
    """Settings of the hand-off, one with the others.

    Args:
        aggregated: there is one worker, and no hand-off.

    Raises:
        ConfigError: a connector of nonsense, or router and workers of unlike ways.
    """
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
