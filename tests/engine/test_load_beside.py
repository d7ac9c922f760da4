"""A request computes the beginning of its prefix while the end of it is loaded into its blocks.

The load of these tests writes rubbish until it has ended, and a step that writes to the same slots
fails (`fake_connector.FakeTransfers`); so does one that reads anything but the request's own tokens
(`fake_executor.FakeExecutor`).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.engine.request import FinishReason, KVTransferParams
from diptych.errors import InvalidRequestError
from tests.engine.engine_driver import Driver, FastLoadsDriver, OverlapDriver
from tests.engine.fake_connector import FakeConnector, commit_of
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request
from tests.engine.test_scheduler_invariants import ACTIONS, Engine, check_answer, finish

PROMPT = list(range(100, 200))  # the store has the first 96: six blocks, of which 32 are computed
CUT, FOUND = 32, 96


def make_driver(
    num_blocks: int = 64,
    kind: type[Driver] = Driver,
    *,
    beside: int = CUT,
    reloads: bool = False,
    **config: object,
) -> Driver:
    connector = FakeConnector(available=FOUND, beside=beside, reloads=reloads)
    return kind(num_blocks, connector=connector, **config)


def answer(prompt: list[int] = PROMPT, count: int = 4) -> list[int]:
    return expected_output(prompt, count)


def loads(driver: Driver) -> dict[str, tuple[int, int]]:
    assert driver.connector is not None
    return {name: (load.start, load.end) for name, load in driver.connector.loads.items()}


# --- what is computed, and what is not


def test_the_beginning_is_computed_while_the_end_is_loaded() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT))
    assert driver.step() == {"a": CUT}
    assert loads(driver) == {"a": (CUT, FOUND)}
    assert [driver.step() for _ in range(3)] == [{}] * 3  # it has come to what is being loaded
    driver.transfers.finish_load("a")
    assert driver.step() == {}
    assert driver.step() == {"a": len(PROMPT) - FOUND}
    driver.run()
    client, stats = driver.clients["a"], driver.stats
    assert client.output == answer()
    assert client.num_cached_tokens == FOUND - CUT
    assert stats.prompt_tokens_external_kv_transfer == FOUND - CUT
    assert stats.prompt_tokens_local_compute == len(PROMPT) - (FOUND - CUT)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks


@pytest.mark.parametrize("budget", [1, 5, 16, 24])
def test_a_load_that_ends_first_waits_for_the_beginning_chunk_by_chunk(budget: int) -> None:
    driver = make_driver(max_num_batched_tokens=budget)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.transfers.finish_load("a")
    computed = budget
    while computed < CUT:
        count = min(budget, CUT - computed)
        assert driver.step() == {"a": count}
        computed += count
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) - (FOUND - CUT)


def test_a_load_is_ordered_though_the_step_has_no_tokens_left() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    other = [7] * 16
    driver.add(make_request("b", other, prompt_logprobs=1), make_request("a", PROMPT))
    assert driver.step() == {"b": 16}
    assert loads(driver) == {"a": (CUT, FOUND)}
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.clients["b"].output == answer(other)


def test_it_is_found_from_behind_what_the_local_cache_has() -> None:
    driver = make_driver(beside=16)
    driver.add(make_request("warm", PROMPT[:40], prompt_logprobs=1, max_tokens=1))
    driver.run()
    driver.add(make_request("a", PROMPT))
    assert driver.step() == {"a": 16}
    assert loads(driver) == {"a": (48, FOUND)}
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.clients["a"].num_cached_tokens == 32 + FOUND - 48


def test_others_are_computed_meanwhile() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT))
    driver.add(make_request("b", [1, 2, 3], max_tokens=8, prompt_logprobs=1))
    assert driver.step() == {"a": CUT, "b": 3}
    while not driver.clients["b"].num_ends:
        driver.step()
    assert "a" in loads(driver)
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.clients["b"].output == answer([1, 2, 3], 8)


def test_prompt_logprobs_are_computed_though_the_prompt_could_be_loaded() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, prompt_logprobs=1))
    driver.run()
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT)


def test_what_is_being_loaded_does_not_wait_to_be_computed() -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT))
    driver.step()
    assert driver.stats.num_pending_tokens == len(PROMPT) - (FOUND - CUT) - 16


# --- a load that fails


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("valid", [0, CUT, CUT + 1, 64, 80])
def test_what_a_failed_load_did_not_bring_is_computed_and_nothing_twice(
    valid: int, when: str
) -> None:
    driver = make_driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT))
    for _ in range(1 if when == "before" else 4):
        driver.step()
    driver.transfers.finish_load("a", valid)
    driver.run()
    brought = max(valid, CUT) - CUT
    assert driver.clients["a"].output == answer()
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) - brought
    assert driver.stats.prompt_tokens_external_kv_transfer == brought
    assert driver.stats.num_kv_load_failures == 1
    driver.add(make_request("b", PROMPT))
    driver.run()
    assert driver.clients["b"].output == answer()


def test_of_a_prompt_that_is_loaded_whole_the_last_token_is_computed() -> None:
    driver = make_driver()
    driver.connector.available = 1000
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.stats.prompt_tokens_local_compute == CUT + 1


# --- names


def test_only_what_is_computed_is_found_by_others_until_the_load_has_ended_and_is_joined() -> None:
    driver = make_driver(max_num_batched_tokens=20)
    driver.add(make_request("a", PROMPT))
    for name, ends, cached in (("b", False, 16), ("c", True, 32), ("d", False, 96)):
        driver.step()
        if ends:
            driver.transfers.finish_load("a")
        hit = driver.scheduler._kv.get_computed_blocks(driver.scheduler._requests["a"])
        assert hit.num_tokens == cached, name
        driver.step()
    driver.run()
    assert driver.clients["a"].output == answer()


def test_the_loaded_part_has_no_name_while_the_beginning_is_missing() -> None:
    driver = make_driver(max_num_batched_tokens=8)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.transfers.finish_load("a")
    driver.step()
    request = driver.scheduler._requests["a"]
    assert driver.scheduler._kv.get_computed_blocks(request).num_tokens == 16
    named = [block for block in driver.scheduler._kv.req_to_blocks["a"][0] if block.block_hash]
    assert len(named) == 1
    driver.run()


# --- ends and room


@pytest.mark.parametrize("kind", [Driver, OverlapDriver])
def test_an_aborted_one_keeps_its_blocks_until_no_byte_can_arrive(kind: type[Driver]) -> None:
    driver = make_driver(8, kind)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.abort("a")
    assert driver.connector.aborted == ["a"]
    other = [3] * 70
    driver.add(make_request("b", other, prompt_logprobs=1))
    for _ in range(3):
        assert driver.step() == {}
    assert driver.clients["a"].reason is FinishReason.ABORT
    assert driver.stats.num_free_kv_blocks == 1
    with pytest.raises(InvalidRequestError):
        driver.add(make_request("a", PROMPT))
    driver.transfers.finish_load("a", CUT)
    driver.run()
    assert driver.clients["b"].output == answer(other)
    assert driver.stats.num_kv_load_failures == 0
    assert driver.stats.num_free_kv_blocks == 8


def test_an_engine_that_fails_ends_it_and_keeps_its_blocks() -> None:
    driver = make_driver(8)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.take(driver.scheduler.fail_requests("gone"))
    assert driver.clients["a"].reason is FinishReason.ERROR
    assert driver.stats.num_free_kv_blocks == 1


@pytest.mark.parametrize("kind", [Driver, OverlapDriver])
def test_it_gives_way_to_nobody_before_its_load_has_ended(kind: type[Driver]) -> None:
    driver = make_driver(9, kind, enable_prefix_caching=False)
    first = [5] * 20
    driver.add(make_request("b", first, max_tokens=40, prompt_logprobs=1))
    driver.step()
    driver.add(make_request("a", PROMPT))
    while driver.stats.num_preemptions == 0:
        driver.step()
    # the older one wanted a third block and had to give way itself
    assert "b" in driver.scheduler._waiting
    assert driver.scheduler._running[0].request_id == "a"
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()
    assert driver.clients["b"].output == answer(first, 40)


@pytest.mark.parametrize("reloads", [False, True])
def test_one_whose_load_has_ended_gives_way_and_forgets_what_came(reloads: bool) -> None:
    driver = make_driver(9, enable_prefix_caching=False, max_num_batched_tokens=4, reloads=reloads)
    first = [5] * 28
    driver.add(make_request("b", first, max_tokens=40, prompt_logprobs=1))
    for _ in range(7):
        driver.step()
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.transfers.finish_load("a")
    assert driver.scheduler._requests["a"].num_computed_tokens < CUT
    while driver.stats.num_preemptions == 0:
        assert driver.stats.prompt_tokens_external_kv_transfer == 0
        driver.step()
    assert driver.scheduler._requests["a"].beside is None
    assert driver.scheduler._requests["a"].num_computed_tokens == 0
    driver.run_with_loads()
    assert driver.clients["a"].output == answer()
    assert driver.clients["b"].output == answer(first, 40)


# --- steps that are planned ahead


def test_nobody_waits_for_the_outside_once_the_load_has_ended() -> None:
    driver = make_driver(kind=OverlapDriver)
    driver.add(make_request("a", PROMPT))
    for _ in range(4):
        driver.step()
    assert driver.core.is_waiting_for_transfers
    driver.transfers.finish_load("a")
    while "a" in loads(driver) or driver.scheduler._requests["a"].beside is not None:
        driver.step()
    assert not driver.core.is_waiting_for_transfers
    driver.run()
    assert driver.clients["a"].output == answer()


def test_steps_are_planned_ahead_up_to_the_cut_and_no_further() -> None:
    driver = make_driver(kind=OverlapDriver, max_num_batched_tokens=8)
    driver.add(make_request("a", PROMPT))
    for _ in range(12):
        driver.step()
    assert driver.device.most_in_flight == 2
    assert [step for step in driver.device.submitted if step] == [{"a": 8}] * (CUT // 8)
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()


def test_the_step_after_the_one_that_comes_to_a_load_that_has_ended_goes_on_behind_it() -> None:
    driver = make_driver(kind=FastLoadsDriver, max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT), make_request("b", [9] * 3, max_tokens=9))
    driver.run()
    steps = [step for step in driver.device.submitted if step]
    last = max(i for i, step in enumerate(steps) if "a" in step)
    assert all("a" in step for step in steps[:last])
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) - (FOUND - CUT) + 3
    assert driver.clients["a"].output == answer()
    assert driver.clients["b"].output == answer([9] * 3, 9)


# --- whatever happens in whatever order

engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(5, 12),
        "max_num_batched_tokens": st.integers(4, 40),
        "max_num_seqs": st.integers(1, 4),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
    }
)
stores = st.builds(
    FakeConnector,
    available=st.sampled_from([33, 48, 1000]),
    beside=st.sampled_from([1, 7, 16, 30]),
    reloads=st.booleans(),
)
additions = st.tuples(
    st.just("add"),
    st.integers(0, 2),
    st.integers(20, 75),
    st.integers(1, 40),
    st.sampled_from(["plain", "plain", "stop", "send", "resume"]),
    st.integers(-2, 2),
)
events = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 6)),
    st.tuples(st.just("abort in step"), st.integers(0, 6)),
    st.tuples(st.just("load ends"), st.sampled_from([None, None, 0, 16, 40])),
    st.tuples(st.just("save ends"), st.sampled_from([None, 1000])),
    *[st.just(("step",))] * 4,
    additions,
)


@pytest.mark.parametrize("kind", [Driver, OverlapDriver, FastLoadsDriver])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    config=engines,
    store=stores,
    first=st.lists(additions, min_size=1, max_size=4),
    then=st.lists(events, max_size=60),
)
def test_no_load_beside_loses_a_block_or_alters_an_answer(
    kind: type[Driver],
    config: dict[str, object],
    store: FakeConnector,
    first: list[tuple[object, ...]],
    then: list[tuple[object, ...]],
) -> None:
    engine = Engine(kind(connector=store, **config), {})
    for name, *arguments in (*first, *then):
        ACTIONS[name](engine, *arguments)
    finish(engine)
    driver = engine.driver
    assert driver.stats.num_free_kv_blocks == driver.stats.num_kv_blocks
    assert driver.stats.num_pending_tokens == 0
    for request_id, request in engine.requests.items():
        check_answer(driver, request_id, request)


def test_what_a_commit_names_is_awaited_whole() -> None:
    driver = make_driver()
    transfer = KVTransferParams(epoch=1, commit=commit_of(len(PROMPT)))
    driver.add(make_request("a", PROMPT, output=answer(count=1), transfer=transfer))
    assert driver.step() == {}
    assert loads(driver) == {"a": (0, len(PROMPT))}
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == answer()[1:]
