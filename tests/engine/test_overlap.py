"""A step is planned and given to the device before the results of the one before are known.

The device of these tests does a step's work when its result is asked for, as late as one may, and
its loads can be over before that.
"""

from __future__ import annotations

import pytest

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore, EngineState
from diptych.engine.request import FinishReason, KVTransferParams
from tests.engine.engine_driver import FastLoadsDriver, OverlapDriver
from tests.engine.fake_connector import FakeConnector, commit_of
from tests.engine.fake_executor import FakeExecutor, LateDevice, expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(20))


def steps_of(driver: OverlapDriver) -> list[dict[str, int]]:
    """The steps that computed anything."""
    return [step for step in driver.device.submitted if step]


def late_stop(name: str, prompt: list[int], count: int) -> dict:
    """A request that a token ends, its `count`th: nobody knows before it has been sampled."""
    return {"stop_token_ids": expected_output(prompt, count)[-1:], "max_tokens": 50}


def test_the_device_has_its_next_step_before_the_results_of_one_are_taken() -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, max_tokens=8), make_request("b", PROMPT[3:], max_tokens=5))
    driver.run()
    assert driver.device.most_in_flight == 2
    assert driver.clients["a"].output == expected_output(PROMPT, 8)
    assert driver.clients["b"].output == expected_output(PROMPT[3:], 5)


def test_an_end_that_is_known_ahead_costs_no_step() -> None:
    driver = OverlapDriver(max_model_len=30)
    driver.add(
        make_request("a", PROMPT, max_tokens=8), make_request("b", PROMPT[1:], max_tokens=99)
    )
    driver.run()
    assert len([s for s in steps_of(driver) if "a" in s]) == 8
    assert len([s for s in steps_of(driver) if "b" in s]) == 11
    assert driver.clients["b"].reason is FinishReason.LENGTH


def test_a_stop_that_is_found_late_drops_the_token_of_the_step_in_flight() -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, **late_stop("a", PROMPT, 3)))
    driver.run()
    client = driver.clients["a"]
    assert client.output == expected_output(PROMPT, 3)
    assert client.reason is FinishReason.STOP
    assert client.stop_token_id == client.output[-1]
    assert len(steps_of(driver)) == 4  # the fourth was on its way
    assert driver.stats.generation_tokens == 3
    assert driver.stats.num_free_kv_blocks == driver.stats.num_kv_blocks


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words_token_ids": [[1, 2]]},
        {"logprobs": 1},
    ],
)
def test_what_looks_at_the_tokens_before_is_planned_ahead_too(sampling: dict) -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, **sampling), make_request("b", PROMPT))
    driver.run()
    assert driver.device.most_in_flight == 2
    assert steps_of(driver)[1:] == [{"a": 1, "b": 1}] * 3
    assert driver.clients["a"].output == expected_output(PROMPT, 4)


def test_a_hand_off_goes_no_further_than_token_1() -> None:
    driver = OverlapDriver(connector=FakeConnector())
    driver.add(make_request("a", PROMPT, transfer=KVTransferParams(do_remote_decode=True)))
    for _ in range(4):
        driver.step()
    assert driver.transfers is not None
    driver.transfers.finish_save("a", commit_of(len(PROMPT)))
    driver.run()
    assert steps_of(driver) == [{"a": len(PROMPT)}]
    assert driver.clients["a"].output == expected_output(PROMPT, 1)
    assert driver.clients["a"].commit is not None


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_a_block_is_not_given_to_a_load_while_a_step_in_flight_may_write_it(end: str) -> None:
    driver = FastLoadsDriver(num_blocks=3, connector=FakeConnector(), enable_prefix_caching=False)
    prompt = list(range(100, 140))  # all three blocks, the last one while it answers
    driver.add(make_request("a", prompt, **late_stop("a", prompt, 4)))
    while len(driver.clients["a"]) < 2:
        driver.step()
    other = list(range(200, 245))
    transfer = KVTransferParams(commit=commit_of(45))
    driver.add(
        make_request("b", other, output=expected_output(other, 1), max_tokens=2, transfer=transfer)
    )
    while not driver.clients["a"].num_ends:
        if end == "abort":
            # past the core, which would settle first where there are transfers
            driver.scheduler.abort_requests(["a"])
        driver.step()
    # the last step of a was in flight: it may still write
    driver.run()
    assert driver.clients["b"].output == expected_output(other, 2)[1:]


def test_blocks_of_an_aborted_request_are_free_only_after_its_last_step() -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, max_tokens=50))
    driver.step()
    driver.step()
    assert driver.device.computing == [True]
    driver.abort("a")
    driver.check()
    assert driver.stats.num_free_kv_blocks < driver.stats.num_kv_blocks
    driver.run()
    assert driver.stats.num_free_kv_blocks == driver.stats.num_kv_blocks
    assert driver.clients["a"].reason is FinishReason.ABORT


def test_a_name_can_be_used_again_while_its_last_step_is_in_flight() -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, max_tokens=50))
    for _ in range(3):
        driver.step()
    driver.abort("a")
    first = driver.clients["a"]
    outputs = driver.core.step()  # it ends
    assert outputs is not None
    driver.take(outputs)
    assert first.reason is FinishReason.ABORT
    driver.add(make_request("b", PROMPT[5:], max_tokens=6))
    driver.step()
    driver.abort("b")
    driver.scheduler.take_outputs()  # nobody listens any more
    driver.add(make_request("b", PROMPT[7:], max_tokens=5))
    driver.run()
    assert driver.clients["b"].output == expected_output(PROMPT[7:], 5)


def test_where_blocks_run_out_the_step_in_flight_ends_before_anyone_gives_way() -> None:
    driver = OverlapDriver(num_blocks=6, enable_prefix_caching=False)
    prompts = {name: [i, *range(30)] for i, name in enumerate("abc")}
    driver.add(*[make_request(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    driver.run()
    assert driver.stats.num_preemptions
    assert driver.device.most_in_flight == 2
    for name, prompt in prompts.items():
        assert driver.clients[name].output == expected_output(prompt, 30)


def test_blocks_filled_by_placeholders_are_found_once_their_tokens_are_known() -> None:
    driver = OverlapDriver()
    driver.add(make_request("a", PROMPT, max_tokens=29))
    driver.run()
    answer = expected_output(PROMPT, 29)
    driver.add(make_request("b", PROMPT + answer, max_tokens=1))
    driver.run()
    assert driver.clients["b"].num_cached_tokens == 48
    assert driver.clients["b"].output == expected_output(PROMPT + answer, 1)


def test_a_device_that_fails_ends_every_request_by_name() -> None:
    executor = FakeExecutor(fail_at=1)
    core = EngineCore(EngineConfig(async_scheduling=True), LateDevice(executor, executor))
    core.add_request(make_request("a", PROMPT))
    seen = [core.step() for _ in range(3)]
    assert core.state is EngineState.FAILED
    assert seen[-1] is not None
    assert seen[-1].finish_reasons == [FinishReason.ERROR]
    assert not core.has_work


def test_token_1_of_a_hand_off_goes_out_before_the_next_prompt_is_launched() -> None:
    driver = OverlapDriver(connector=FakeConnector(), max_num_batched_tokens=len(PROMPT))
    out = KVTransferParams(do_remote_decode=True)
    driver.add(make_request("a", PROMPT, transfer=out), make_request("b", PROMPT[1:], transfer=out))
    assert driver.step() == {"a": len(PROMPT)}
    assert not driver.clients["a"].output
    assert driver.step() == {}
    assert driver.clients["a"].output == expected_output(PROMPT, 1)
    assert driver.connector is not None
    assert driver.connector.num_flushes == 1  # and the word to its reader with it
    assert driver.step() == {"b": len(PROMPT) - 1}


def test_a_save_that_ends_while_the_next_prompt_is_computed_is_told_at_once() -> None:
    driver = OverlapDriver(connector=FakeConnector(), max_num_batched_tokens=len(PROMPT))
    out = KVTransferParams(do_remote_decode=True)
    driver.add(make_request("a", PROMPT, transfer=out), make_request("b", PROMPT[1:], transfer=out))
    while "b" not in driver.step():
        pass
    assert driver.transfers is not None
    driver.transfers.finish_save("a", commit_of(len(PROMPT)))
    assert driver.device.computing == [True]
    assert driver.step() == {}
    assert driver.clients["a"].commit is not None
    assert driver.device.computing == [True]
    driver.step()
    assert driver.clients["b"].output == expected_output(PROMPT[1:], 1)
    driver.transfers.finish_save("b", commit_of(len(PROMPT) - 1))
    driver.run()
    assert driver.stats.num_free_kv_blocks == driver.stats.num_kv_blocks


def test_a_failure_found_while_aborting_is_reported_by_the_next_step() -> None:
    connector, executor = FakeConnector(), FakeExecutor(fail_at=1)
    core = EngineCore(
        EngineConfig(async_scheduling=True), LateDevice(executor, executor), connector
    )
    core.add_request(make_request("a", PROMPT))
    core.add_request(make_request("b", PROMPT))
    core.step()
    core.step()
    core.abort(["b"])
    outputs = core.step()
    assert outputs is not None
    assert core.state is EngineState.FAILED
    assert sorted(outputs.request_ids) == ["a", "a", "b", "b"] or outputs.errors


@pytest.mark.parametrize("is_async", [False, True])
def test_the_row_of_the_only_request_is_dropped_when_it_is_aborted(is_async: bool) -> None:
    executor = FakeExecutor()
    core = EngineCore(EngineConfig(async_scheduling=is_async), LateDevice(executor, executor))
    core.add_request(make_request("a", PROMPT))
    core.step()
    core.abort(["a"])
    while core.has_work:
        core.step()
    assert not executor.rows
