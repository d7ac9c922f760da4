"""Runs the planner: observe, decide, act, every few seconds, whatever goes wrong in between."""

from __future__ import annotations

import logging
from collections.abc import Callable

from diptych.clock import Clock
from diptych.config import PlannerConfig
from diptych.errors import DiptychError
from diptych.services.router.planner import Memory, Plan, PoolLoad, plan
from diptych.services.router.scalers import Scaler

logger = logging.getLogger(__name__)

Observe = Callable[[str], PoolLoad]


class PlannerLoop:
    """One planner over two pools.

    `observe(pool)` says what the router sees of a pool; its `num_wanted` is overwritten by what the
    scaler says was asked for. `last_plan` is the last decision, for whoever wants to show it.
    """

    def __init__(
        self, config: PlannerConfig, observe: Observe, scaler: Scaler, clock: Clock
    ) -> None:
        self._config = config
        self._observe = observe
        self._scaler = scaler
        self._clock = clock
        self._memory = Memory()
        self.last_plan: Plan | None = None

    async def run(self) -> None:
        """Decide forever; an error is logged and the next round starts afresh."""
        try:
            while True:
                await self._clock.sleep(self._config.interval_s)
                try:
                    await self.decide()
                except DiptychError as error:
                    logger.warning("planner: %s", error.message)
                except Exception:
                    # a planner that dies silently would leave the pools as they are for good
                    logger.exception("planner")
        finally:
            await self._scaler.close()

    async def decide(self) -> Plan:
        """One round.

        Raises:
            DiptychError: the scaler could not be asked or refused.
        """
        wanted = {pool: await self._scaler.replicas(pool) for pool in ("prefill", "decode")}
        loads = {pool: _with_wanted(self._observe(pool), n) for pool, n in wanted.items()}
        decided = plan(
            self._config,
            loads["prefill"],
            loads["decode"],
            self._memory,
            self._clock.monotonic(),
        )
        self._memory = decided.memory
        self.last_plan = decided
        sizes = {"prefill": decided.prefill, "decode": decided.decode}
        # A shrink comes before a growth: both may live under one budget of GPUs.
        for pool in sorted(sizes, key=lambda pool: sizes[pool] - wanted[pool]):
            if sizes[pool] != wanted[pool]:
                logger.info("planner: %s %d -> %d", pool, wanted[pool], sizes[pool])
                await self._scaler.scale(pool, sizes[pool])
        return decided


def _with_wanted(load: PoolLoad, num_wanted: int) -> PoolLoad:
    return PoolLoad(load.num_ready, num_wanted, load.num_waiting, load.kv_usage)
