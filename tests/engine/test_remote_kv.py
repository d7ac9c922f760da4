import pytest

from diptych.connectors.base import HandedOver
from diptych.engine.request import FinishReason, KVTransferParams
from tests.engine.engine_driver import Driver
from tests.engine.fake_connector import FakeConnector, commit_of
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(100, 140))
TOKEN_1 = expected_output(PROMPT, 1)
SEND = KVTransferParams(epoch=3, do_remote_decode=True)


def receive(num_tokens: int = len(PROMPT), cached: int = 0) -> KVTransferParams:
    return KVTransferParams(epoch=1, commit=commit_of(num_tokens, cached))


def make_driver(num_blocks: int = 64, *, available: int = 0, **config: object) -> Driver:
    return Driver(num_blocks, connector=FakeConnector(available=available), **config)


# --- prefill


def test_token_1_is_sent_at_once_and_the_commit_follows_the_save() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, transfer=SEND))
    driver.step()
    client = driver.clients["a"]
    assert client.output == TOKEN_1
    assert client.reason is FinishReason.UNSPECIFIED
    assert client.commit is None
    assert driver.stats.num_running == 0
    assert driver.stats.num_free_kv_blocks == 64 - 3
    assert driver.step() == {}
    driver.transfers.finish_save("a", commit_of(len(PROMPT)))
    driver.step()
    assert client.commit is not None
    assert client.commit.num_tokens == len(PROMPT)
    assert client.commit.epoch == 3
    assert client.output == TOKEN_1
    assert driver.stats.num_free_kv_blocks == 64
    assert not driver.scheduler.has_requests
    assert driver.stats.num_kv_save_failures == 0


def test_the_commit_tells_what_prefill_found_cached() -> None:
    driver = make_driver()
    driver.add(make_request("warm", PROMPT, max_tokens=1))
    driver.run()
    driver.add(make_request("a", PROMPT, transfer=SEND))
    driver.step()
    driver.transfers.finish_save("a", commit_of(len(PROMPT)))
    driver.run()
    assert driver.clients["a"].commit.num_cached_tokens == 32


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"eos": TOKEN_1}, FinishReason.STOP),
        ({"stop_token_ids": TOKEN_1}, FinishReason.STOP),
    ],
)
def test_a_request_that_token_1_ends_needs_no_commit(
    fields: dict[str, object], reason: FinishReason
) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, transfer=SEND, **fields))
    driver.step()
    assert driver.clients["a"].reason is reason
    assert driver.connector.aborted == ["a"]
    assert driver.stats.num_free_kv_blocks == 64 - 3
    driver.transfers.finish_save("a", commit_of(len(PROMPT)))
    driver.run()
    assert driver.clients["a"].commit is None
    assert driver.stats.num_free_kv_blocks == 64


@pytest.mark.parametrize("commit", [None, commit_of(0), commit_of(16)])
def test_a_save_that_failed_still_lets_the_request_go_on(commit: object) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, transfer=SEND))
    driver.step()
    driver.transfers.finish_save("a", commit)
    driver.run()
    assert driver.clients["a"].commit.num_tokens == (commit.num_tokens if commit else 0)
    assert driver.clients["a"].num_ends == 1
    assert driver.stats.num_kv_save_failures == 1


def test_without_a_connector_the_hand_off_carries_nothing_but_goes_on() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT, transfer=SEND))
    driver.run()
    assert driver.clients["a"].output == TOKEN_1
    assert driver.clients["a"].commit.num_tokens == 0


def test_an_abort_during_the_save_keeps_the_blocks_until_the_save_has_ended() -> None:
    driver = make_driver(4)
    driver.add(make_request("a", PROMPT, transfer=SEND))
    driver.step()
    driver.scheduler.abort_requests(["a"])
    driver.add(make_request("b", list(range(40)), max_tokens=1))
    driver.step()
    assert driver.clients["a"].reason is FinishReason.ABORT
    assert driver.clients["a"].commit is None
    assert driver.stats.num_free_kv_blocks == 1
    assert driver.step() == {}
    driver.transfers.finish_save("a", None)
    driver.run()
    assert driver.clients["b"].output == expected_output(list(range(40)), 1)
    assert driver.stats.num_kv_save_failures == 0


# --- decode


def test_after_a_load_decode_computes_no_prompt_token() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive(cached=16)))
    assert driver.step() == {}
    assert driver.stats.num_waiting == 1
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)[1:]
    stats = driver.stats
    assert stats.prompt_tokens_local_compute == 0
    assert stats.prompt_tokens_external_kv_transfer == len(PROMPT)
    assert driver.executor.steps[2:] == [{"a": 1}] * 3
    assert driver.clients["a"].num_cached_tokens == 16


def test_without_token_1_just_the_last_prompt_token_is_computed() -> None:
    driver = make_driver(available=1000)
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)
    assert driver.stats.prompt_tokens_local_compute == 1
    assert driver.clients["a"].num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("valid", [0, 1, 16, 33, 39])
def test_what_a_failed_load_did_not_bring_is_computed(valid: int) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.step()
    driver.transfers.finish_load("a", valid)
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)[1:]
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) - valid
    assert driver.stats.prompt_tokens_external_kv_transfer == valid
    assert driver.stats.num_kv_load_failures == 1


@pytest.mark.parametrize("stored", [0, 16, 20])
def test_a_commit_that_covers_less_than_the_prompt_leaves_the_rest_to_compute(stored: int) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive(stored)))
    driver.step()
    if stored:
        driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)[1:]
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) - stored


def test_only_what_the_local_cache_lacks_is_loaded() -> None:
    driver = make_driver()
    driver.add(make_request("warm", PROMPT, max_tokens=1))
    driver.run()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.step()
    assert (driver.connector.loads["a"].start, driver.connector.loads["a"].end) == (32, 40)
    driver.transfers.finish_load("a", 0)
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)[1:]
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT) + 8


def test_loaded_blocks_are_found_by_later_requests() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.step()
    driver.transfers.finish_load("a")
    driver.run()
    driver.add(make_request("b", PROMPT))
    driver.run()
    assert driver.clients["b"].num_cached_tokens == 32
    assert driver.clients["b"].output == expected_output(PROMPT, 4)


def test_blocks_that_are_still_loading_are_not_found_by_others() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.step()
    driver.add(make_request("b", PROMPT))
    driver.step()
    assert driver.clients["b"].num_cached_tokens == 0
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["b"].output == expected_output(PROMPT, 4)


def test_a_load_does_not_hold_up_those_behind_it() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.add(make_request("b", [1, 2, 3], max_tokens=1))
    assert driver.step() == {"b": 3}
    assert driver.clients["b"].num_ends == 1


def test_a_load_is_ordered_only_with_all_blocks_and_the_next_slot() -> None:
    driver = make_driver(5)
    prompt = list(range(32))
    driver.add(make_request("b", list(range(50, 90)), max_tokens=4))
    driver.step()
    token_1 = expected_output(prompt, 1)
    driver.add(make_request("a", prompt, output=token_1, transfer=receive(32)))
    driver.step()
    assert driver.stats.num_free_kv_blocks == 2  # enough for the prompt, not for the slot after it
    assert not driver.connector.loads
    while "b" in driver.scheduler._requests:
        driver.step()
    driver.step()
    assert len(driver.connector.loads["a"].block_ids) == 3
    driver.run_with_loads()
    assert driver.clients["a"].output == expected_output(prompt, 4)[1:]


def test_an_aborted_load_keeps_its_blocks_until_no_byte_can_arrive() -> None:
    driver = make_driver(4)
    driver.add(make_request("a", PROMPT, output=TOKEN_1, transfer=receive()))
    driver.step()
    driver.scheduler.abort_requests(["a"])
    assert driver.connector.aborted == ["a"]
    driver.add(make_request("b", list(range(40)), max_tokens=1))
    assert driver.step() == {}
    assert driver.clients["a"].reason is FinishReason.ABORT
    assert driver.stats.num_free_kv_blocks == 1
    driver.transfers.finish_load("a", 16)
    driver.run()
    assert driver.clients["b"].output == expected_output(list(range(40)), 1)
    assert driver.stats.num_kv_load_failures == 0


def test_prompt_logprobs_are_computed_though_the_prompt_could_be_loaded() -> None:
    driver = make_driver(available=1000)
    driver.add(make_request("a", PROMPT, prompt_logprobs=1))
    driver.run()
    assert driver.stats.prompt_tokens_local_compute == len(PROMPT)


def test_a_preempted_request_computes_again_and_loads_no_second_time() -> None:
    driver = make_driver(6)
    driver.add(make_request("b", [7] * 30, max_tokens=40))
    driver.add(make_request("a", PROMPT, output=TOKEN_1, max_tokens=20, transfer=receive()))
    driver.step()
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.stats.num_preemptions > 0
    assert not driver.connector.loads
    assert driver.clients["a"].output == expected_output(PROMPT, 20)[1:]
    assert driver.clients["b"].output == expected_output([7] * 30, 40)


@pytest.mark.parametrize("valid", [None, 0, 20])
def test_a_load_within_the_step_is_used_and_its_failure_discards_the_step(
    valid: int | None,
) -> None:
    driver = Driver(connector=FakeConnector(available=1000, is_async=False))
    if valid is not None:
        driver.transfers.sync_valid["a"] = valid
        driver.executor.checks_reads = False
    driver.add(make_request("a", PROMPT))
    driver.step()
    driver.executor.checks_reads = True
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 4)
    expected = 1 if valid is None else len(PROMPT) - valid
    assert driver.stats.prompt_tokens_local_compute == expected
    assert driver.stats.num_kv_load_failures == (valid is not None)
    driver.add(make_request("b", PROMPT))
    driver.run()
    assert driver.clients["b"].output == expected_output(PROMPT, 4)


# --- from a peer's memory


def test_a_token_that_comes_with_the_kv_is_not_sent_again() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=6, transfer=receive()))
    driver.step()
    driver.transfers.report.handed_over["a"] = HandedOver(TOKEN_1[0], 5)
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 6)[1:]
    assert driver.stats.prompt_tokens_local_compute == 0
    assert driver.stats.prompt_tokens_external_kv_transfer == len(PROMPT)
    assert driver.stats.num_free_kv_blocks == 64


def test_a_token_that_comes_with_the_kv_may_end_the_request() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, eos=TOKEN_1, transfer=receive()))
    driver.step()
    driver.transfers.report.handed_over["a"] = HandedOver(TOKEN_1[0], 5)
    driver.transfers.finish_load("a")
    driver.run()
    assert driver.clients["a"].output == []
    assert driver.clients["a"].reason is FinishReason.STOP
    assert driver.stats.num_free_kv_blocks == 64


def test_kv_that_will_not_come_ends_the_request_and_its_blocks_stay_until_nothing_writes() -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, transfer=receive()))
    driver.step()
    driver.transfers.report.failed_handoffs |= {"a": "lost", "unknown": "lost"}
    driver.step()
    assert driver.clients["a"].reason is FinishReason.ERROR
    assert driver.connector.aborted == ["a"]
    assert driver.stats.num_free_kv_blocks < 64
    driver.transfers.finish_load("a", 0)
    driver.step()
    assert driver.stats.num_free_kv_blocks == 64
    assert not driver.scheduler.has_requests


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_a_peer_reads_gives_way_last_among_the_equally_important(policy: str) -> None:
    driver = make_driver(6, scheduling_policy=policy)
    driver.connector.read_by_peers = {"c"}
    prompts = {name: [ord(name)] * 20 for name in "abc"}
    for priority, (name, prompt) in enumerate(prompts.items()):
        driver.add(make_request(name, prompt, max_tokens=30, priority=priority))
    lost = []
    while driver.scheduler.has_requests:
        before = driver.stats.num_preemptions
        driver.step()
        if driver.stats.num_preemptions > before:
            lost += driver.scheduler._waiting._requests
    assert lost[0] == ("b" if policy == "fcfs" else "c")
    for name, prompt in prompts.items():
        assert driver.clients[name].output == expected_output(prompt, 30)
