"""How many workers each pool should have: a pure function from observed load.

Grow on queueing or KV use, shrink one at a time when the pool would still have slack without the
worker, never act on what is not known. Both pools share one budget; a shrink comes before a growth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from diptych.config import PlannerConfig

# A pool shrinks only if, afterwards, it still has this share of room below the growth threshold.
_SLACK = 0.20


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What was seen of one pool.

    `num_ready` workers answered; `num_wanted` were asked for (the difference is starting). A figure
    that some worker did not report is None: missing is not zero.
    """

    num_ready: int
    num_wanted: int
    num_waiting: int | None
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What the planner remembers of one pool."""

    changed_s: float = -math.inf
    pending_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the planner remembers between decisions."""

    prefill: PoolMemory = PoolMemory()
    decode: PoolMemory = PoolMemory()


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers per pool, why, and what to remember."""

    prefill: int
    decode: int
    reasons: tuple[str, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Wish:
    replicas: int
    reason: str
    pressure: float


def plan(
    config: PlannerConfig, prefill: PoolLoad, decode: PoolLoad, memory: Memory, now_s: float
) -> Plan:
    """Decide both pools' sizes.

    Args:
        now_s: a monotonic clock's reading, the same clock at every call.
    """
    memory = Memory(
        _remember_pending(memory.prefill, prefill, now_s),
        _remember_pending(memory.decode, decode, now_s),
    )
    wishes = (
        _wish_prefill(config, prefill, memory.prefill, now_s),
        _wish_decode(config, decode, memory.decode, now_s),
    )
    sizes = _share_budget(config, (prefill.num_wanted, decode.num_wanted), wishes)
    return Plan(
        prefill=sizes[0],
        decode=sizes[1],
        reasons=tuple(wish.reason for wish in wishes),
        memory=Memory(
            _remember_change(memory.prefill, prefill.num_wanted, sizes[0], now_s),
            _remember_change(memory.decode, decode.num_wanted, sizes[1], now_s),
        ),
    )


def _wish_prefill(config: PlannerConfig, load: PoolLoad, memory: PoolMemory, now_s: float) -> _Wish:
    low, high = config.min_prefill, config.max_prefill
    return _wish(config, load, memory, now_s, name="prefill", bounds=(low, high), kv=None)


def _wish_decode(config: PlannerConfig, load: PoolLoad, memory: PoolMemory, now_s: float) -> _Wish:
    low, high = config.min_decode, config.max_decode
    kv = load.kv_usage
    known = replace(load, num_waiting=None) if kv is None else load
    return _wish(config, known, memory, now_s, name="decode", bounds=(low, high), kv=kv)


def _wish(
    config: PlannerConfig,
    load: PoolLoad,
    memory: PoolMemory,
    now_s: float,
    *,
    name: str,
    bounds: tuple[int, int],
    kv: float | None,
) -> _Wish:
    """One pool's wish, before the budget."""
    low, high = bounds
    wanted = load.num_wanted
    if wanted < low:
        return _Wish(low, f"{name}: below its least {low}", math.inf)
    if wanted > high:
        return _Wish(high, f"{name}: above its most {high}", 0.0)
    if load.num_waiting is None:
        return _Wish(wanted, f"{name}: load not known, kept", 0.0)
    counted = _counted(config, load, memory, now_s)
    queue = load.num_waiting / counted
    pressure = max(queue / config.queue_high, (kv or 0.0) / config.kv_high)
    if pressure >= 1.0:
        if counted > load.num_ready:
            return _Wish(wanted, f"{name}: a worker is starting, kept", pressure)
        # No more than double at once: the queue that made it grow is partly over by then.
        grown = min(high, 2 * wanted, max(wanted + 1, math.ceil(wanted * pressure)))
        return _Wish(grown, f"{name}: {queue:.1f} waiting each, KV {kv or 0.0:.0%}", pressure)
    if _may_shrink(config, load, kv, memory, now_s) and wanted > low:
        return _Wish(wanted - 1, f"{name}: idle, one fewer", pressure)
    return _Wish(wanted, f"{name}: kept", pressure)


def _counted(config: PlannerConfig, load: PoolLoad, memory: PoolMemory, now_s: float) -> int:
    """Workers to divide the load by: those that start count too, until they took too long."""
    since = memory.pending_since_s
    if since is not None and now_s - since > config.pending_timeout_s:
        return max(1, load.num_ready)
    return max(1, load.num_ready, load.num_wanted)


def _may_shrink(
    config: PlannerConfig, load: PoolLoad, kv: float | None, memory: PoolMemory, now_s: float
) -> bool:
    if load.num_ready != load.num_wanted or load.num_ready < 2:
        return False
    if now_s - memory.changed_s < config.cooldown_s:
        return False
    waiting = load.num_waiting or 0
    left = load.num_ready - 1
    if waiting / load.num_ready > config.queue_low:
        return False
    if waiting / left > config.queue_high * (1 - _SLACK):
        return False
    if kv is None:
        return True
    return kv <= config.kv_low and kv * load.num_ready / left <= config.kv_high * (1 - _SLACK)


def _share_budget(
    config: PlannerConfig, wanted: tuple[int, int], wishes: tuple[_Wish, _Wish]
) -> tuple[int, int]:
    """Shrinks first; then growth by pressure, one worker at a time, as far as the budget goes."""
    sizes = [min(now, wish.replicas) for now, wish in zip(wanted, wishes, strict=True)]
    room = config.worker_budget - sum(sizes)
    while room > 0:
        growing = [i for i in (0, 1) if sizes[i] < wishes[i].replicas]
        if not growing:
            break
        neediest = max(growing, key=lambda i: wishes[i].pressure)
        sizes[neediest] += 1
        room -= 1
    return sizes[0], sizes[1]


def _remember_pending(memory: PoolMemory, load: PoolLoad, now_s: float) -> PoolMemory:
    if load.num_ready >= load.num_wanted:
        return replace(memory, pending_since_s=None)
    if memory.pending_since_s is None:
        return replace(memory, pending_since_s=now_s)
    return memory


def _remember_change(memory: PoolMemory, before: int, after: int, now_s: float) -> PoolMemory:
    return replace(memory, changed_s=now_s) if after != before else memory
