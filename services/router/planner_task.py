"""The planner beside a running router: what it sees of the pools, and its task."""

from __future__ import annotations

import asyncio

from diptych.config import PlannerConfig
from diptych.services.router.main import Background, RouterParts
from diptych.services.router.membership import Members
from diptych.services.router.planner import PoolLoad
from diptych.services.router.planner_loop import PlannerLoop
from diptych.services.router.routable import Role
from diptych.services.router.scalers import make_scaler

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def planner_background(config: PlannerConfig) -> Background | None:
    """What starts the planner beside a router; None where it is switched off.

    Raises:
        ConfigError: the scaler is unknown or lacks a setting.
    """
    if not config.autoscale:
        return None
    scaler = make_scaler(config)

    def start(parts: RouterParts) -> asyncio.Task[None]:
        def observe(pool: str) -> PoolLoad:
            return observe_pool(parts.members, _ROLES[pool])

        return asyncio.create_task(PlannerLoop(config, observe, scaler, parts.clock).run())

    return start


def observe_pool(members: Members, role: Role) -> PoolLoad:
    """Load of the pool's ready workers; not known where one of them cannot be heard just now."""
    links = [link for link in members.links if link.role == role]
    ready = [link for link in links if link.ready]
    heard = all(link.connected for link in links)
    if not ready or not heard:
        return PoolLoad(len(ready), len(ready), None, None)
    return PoolLoad(
        num_ready=len(ready),
        num_wanted=len(ready),
        num_waiting=sum(link.load.num_waiting for link in ready),
        kv_usage=max(link.load.kv_usage for link in ready),
    )
