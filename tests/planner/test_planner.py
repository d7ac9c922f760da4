"""The planner grows on need, shrinks with slack, and never acts on what it does not know."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from diptych.config import PlannerConfig
from diptych.services.router.planner import Memory, PoolLoad, PoolMemory, plan

CONFIG = PlannerConfig(max_prefill=4, max_decode=4, worker_budget=6, cooldown_s=30.0)
IDLE = PoolLoad(num_ready=1, num_wanted=1, num_waiting=0, kv_usage=0.0)


def sizes(
    prefill: PoolLoad = IDLE,
    decode: PoolLoad = IDLE,
    memory: Memory | None = None,
    now_s: float = 1000.0,
    config: PlannerConfig = CONFIG,
) -> tuple[int, int]:
    decided = plan(config, prefill, decode, memory or Memory(), now_s)
    return decided.prefill, decided.decode


def test_idle_pools_are_kept() -> None:
    assert sizes() == (1, 1)


def test_a_queue_grows_prefill_by_its_pressure_but_at_most_to_double() -> None:
    assert sizes(prefill=replace(IDLE, num_waiting=4)) == (2, 1)
    assert sizes(prefill=replace(IDLE, num_waiting=400)) == (2, 1)


def test_kv_use_grows_decode() -> None:
    assert sizes(decode=replace(IDLE, kv_usage=0.9)) == (1, 2)


def test_missing_figures_change_nothing() -> None:
    unknown = PoolLoad(num_ready=2, num_wanted=2, num_waiting=None, kv_usage=None)

    assert sizes(prefill=unknown, decode=unknown) == (2, 2)
    assert sizes(decode=replace(unknown, num_waiting=0)) == (1, 2)


def test_a_starting_worker_is_waited_for_until_it_took_too_long() -> None:
    starting = PoolLoad(num_ready=1, num_wanted=2, num_waiting=9, kv_usage=0.0)
    pending = Memory(prefill=PoolMemory(pending_since_s=900.0))
    late = Memory(prefill=PoolMemory(pending_since_s=100.0))

    assert sizes(prefill=starting, memory=pending) == (2, 1)
    assert sizes(prefill=starting, memory=late)[0] > 2


def test_idle_workers_go_one_at_a_time_and_only_after_the_cooldown() -> None:
    three = replace(IDLE, num_ready=3, num_wanted=3)
    recent = Memory(prefill=PoolMemory(changed_s=980.0))

    assert sizes(prefill=three) == (2, 1)
    assert sizes(prefill=three, memory=recent) == (3, 1)


def test_no_shrink_without_slack_afterwards() -> None:
    eager = replace(CONFIG, kv_low=0.84)
    two = PoolLoad(num_ready=2, num_wanted=2, num_waiting=0, kv_usage=0.5)

    assert sizes(decode=two, config=eager) == (1, 2)


def test_the_neediest_pool_gets_the_last_of_the_budget() -> None:
    tight = replace(CONFIG, worker_budget=3)

    assert sizes(
        prefill=replace(IDLE, num_waiting=5), decode=replace(IDLE, num_waiting=50), config=tight
    ) == (1, 2)


def test_a_shrink_makes_room_for_a_growth_in_the_same_decision() -> None:
    tight = replace(CONFIG, worker_budget=4)
    idle = replace(IDLE, num_ready=3, num_wanted=3)

    assert sizes(prefill=idle, decode=replace(IDLE, kv_usage=0.95), config=tight) == (2, 2)


def test_pools_are_brought_inside_their_bounds() -> None:
    none = PoolLoad(num_ready=0, num_wanted=0, num_waiting=None, kv_usage=None)
    many = replace(IDLE, num_ready=5, num_wanted=5)

    assert sizes(prefill=none, decode=many) == (1, 4)


loads = st.builds(
    lambda ready, starting, waiting, kv: PoolLoad(ready, ready + starting, waiting, kv),
    st.integers(0, 6),
    st.integers(0, 2),
    st.none() | st.integers(0, 1000),
    st.none() | st.floats(0.0, 1.0),
)


@given(prefill=loads, decode=loads)
def test_bounds_and_budget_always_hold(prefill: PoolLoad, decode: PoolLoad) -> None:
    decided = plan(CONFIG, prefill, decode, Memory(), 0.0)
    grown = decided.prefill > prefill.num_wanted or decided.decode > decode.num_wanted

    assert decided.prefill <= CONFIG.max_prefill
    assert decided.decode <= CONFIG.max_decode
    assert not grown or decided.prefill + decided.decode <= CONFIG.worker_budget
