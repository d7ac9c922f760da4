import pytest

from diptych.engine.request import FinishReason, TokenLogprobs
from diptych.errors import CapacityError, InvalidRequestError
from tests.engine.engine_driver import Driver
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(100, 140))


def test_a_request_gets_the_tokens_that_its_prompt_calls_for() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT, max_tokens=20))
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 20)
    assert driver.clients["a"].reason is FinishReason.LENGTH
    assert driver.stats.num_free_kv_blocks == 64


def test_many_requests_share_steps_and_each_gets_its_own_answer() -> None:
    driver = Driver()
    prompts = {str(i): [i, i + 1, i + 2] * (i + 1) for i in range(8)}
    driver.add(*[make_request(i, p, max_tokens=6) for i, p in prompts.items()])
    assert len(driver.step()) == 8
    driver.run()
    for request_id, prompt in prompts.items():
        assert driver.clients[request_id].output == expected_output(prompt, 6)


def test_a_step_computes_no_more_tokens_than_the_budget() -> None:
    driver = Driver(max_num_batched_tokens=32)
    driver.add(make_request("a", PROMPT), make_request("b", list(range(50))))
    steps = []
    while driver.scheduler.has_requests:
        steps.append(driver.step())
    assert all(sum(step.values()) <= 32 for step in steps)
    assert steps[0] == {"a": 32}
    assert steps[1] == {"a": 8, "b": 24}
    assert driver.clients["b"].output == expected_output(list(range(50)), 4)


def test_a_long_prompt_takes_at_most_the_threshold_per_step() -> None:
    driver = Driver(long_prefill_token_threshold=16)
    driver.add(make_request("a", PROMPT), make_request("b", list(range(5))))
    assert [driver.step() for _ in range(3)] == [
        {"a": 16, "b": 5},
        {"a": 16, "b": 1},
        {"a": 8, "b": 1},
    ]


def test_a_long_prompt_in_front_leaves_a_token_for_each_request_behind() -> None:
    driver = Driver(max_num_batched_tokens=16, scheduling_policy="priority")
    driver.add(make_request("b", [1, 2, 3], max_tokens=50, priority=5))
    driver.step()
    driver.add(make_request("a", list(range(100)), priority=0))
    driver.step()
    assert driver.step() == {"a": 15, "b": 1}


def test_no_more_requests_run_than_have_places() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(*[make_request(str(i), [i, 1, 2]) for i in range(5)])
    while driver.scheduler.has_requests:
        assert len(driver.step()) <= 2
    assert all(client.num_ends == 1 for client in driver.clients.values())


def test_first_come_first_served() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(*[make_request(i, [5, 6], max_tokens=1) for i in "abc"])
    assert [list(driver.step()) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_lower_priority_values_first_and_ties_by_arrival() -> None:
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    for request_id, priority in [("a", 3), ("b", -1), ("c", 3), ("d", 0)]:
        driver.add(make_request(request_id, [5, 6], max_tokens=1, priority=priority))
    assert [next(iter(driver.step())) for _ in range(4)] == ["b", "d", "a", "c"]


def test_priorities_count_for_nothing_under_fcfs() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request("a", [1], max_tokens=1, priority=9))
    driver.add(make_request("b", [1], max_tokens=1, priority=0))
    assert [next(iter(driver.step())) for _ in range(2)] == ["a", "b"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_takes_the_last_request_and_keeps_its_output(policy: str) -> None:
    driver = Driver(6, scheduling_policy=policy)
    prompts = {i: [ord(i)] * 20 for i in "abc"}
    priorities = {"a": 1, "b": 0, "c": 2}
    driver.add(
        *[
            make_request(i, p, max_tokens=30, priority=priorities[i], min_tokens=30)
            for i, p in prompts.items()
        ]
    )
    lost = set()
    while driver.scheduler.has_requests:
        before = driver.stats.num_preemptions
        driver.step()
        if driver.stats.num_preemptions > before:
            lost |= set(driver.scheduler._waiting._requests)
    assert driver.stats.num_preemptions > 0
    assert "c" in lost
    assert ("a" if policy == "fcfs" else "b") not in lost
    for i, prompt in prompts.items():
        assert driver.clients[i].output == expected_output(prompt, 30)


def test_a_shared_prefix_is_computed_once() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT))
    driver.run()
    driver.add(make_request("b", [*PROMPT, 1, 2]))
    driver.run()
    stats = driver.stats
    assert driver.clients["b"].num_cached_tokens == 32
    assert driver.clients["b"].output == expected_output([*PROMPT, 1, 2], 4)
    assert stats.prompt_tokens_local_compute == 40 + 10
    assert stats.prompt_tokens_local_cache_hit == 32
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (82, 32)
    assert stats.generation_tokens == 8


def test_requests_of_one_step_share_a_prefix_too() -> None:
    driver = Driver()
    driver.add(*[make_request(str(i), [*PROMPT, i]) for i in range(3)])
    assert driver.step() == {"0": 41, "1": 9, "2": 9}
    driver.run()
    for i in range(3):
        assert driver.clients[str(i)].output == expected_output([*PROMPT, i], 4)
    assert driver.stats.prefix_cache_hits == 64


def test_the_output_of_one_turn_is_found_by_the_next() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT, max_tokens=30))
    driver.run()
    turn = [*PROMPT, *driver.clients["a"].output, 1, 2, 3]
    driver.add(make_request("b", turn))
    driver.run()
    assert driver.clients["b"].num_cached_tokens == 64
    assert driver.clients["b"].output == expected_output(turn, 4)


def test_without_prefix_caching_everything_is_computed_and_the_answer_is_the_same() -> None:
    driver = Driver(enable_prefix_caching=False)
    for request_id in "ab":
        driver.add(make_request(request_id, PROMPT))
        driver.run()
    assert driver.stats.prompt_tokens_local_compute == 80
    assert driver.clients["b"].num_cached_tokens == 0
    assert driver.clients["a"].output == driver.clients["b"].output


def test_end_of_sequence_ends_and_ignore_eos_does_not() -> None:
    third = expected_output(PROMPT, 3)[2]
    driver = Driver()
    driver.add(make_request("a", PROMPT, eos=[third], max_tokens=9))
    driver.add(make_request("b", PROMPT, eos=[third], max_tokens=9, ignore_eos=True))
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 3)
    assert driver.clients["a"].reason is FinishReason.STOP
    assert driver.clients["a"].stop_token_id == -1
    assert len(driver.clients["b"]) == 9


def test_a_stop_token_ends_and_is_named() -> None:
    third = expected_output(PROMPT, 3)[2]
    driver = Driver()
    driver.add(make_request("a", PROMPT, stop_token_ids=[third], max_tokens=9))
    driver.run()
    assert driver.clients["a"].output == expected_output(PROMPT, 3)
    assert driver.clients["a"].stop_token_id == third


def test_nothing_stops_before_min_tokens() -> None:
    third = expected_output(PROMPT, 3)[2]
    driver = Driver()
    driver.add(
        make_request("a", PROMPT, stop_token_ids=[third], eos=[third], max_tokens=9, min_tokens=4)
    )
    driver.run()
    assert len(driver.clients["a"]) == 9


def test_the_context_length_ends_an_answer() -> None:
    driver = Driver(max_model_len=50)
    driver.add(make_request("a", PROMPT, max_tokens=1000))
    driver.run()
    assert len(driver.clients["a"]) == 10
    assert driver.clients["a"].reason is FinishReason.LENGTH


def test_the_context_length_is_at_most_what_the_pool_holds() -> None:
    driver = Driver(3, max_model_len=1000)
    assert driver.scheduler.max_model_len == 48
    driver.add(make_request("a", PROMPT, max_tokens=1000))
    driver.run()
    assert len(driver.clients["a"]) == 8


@pytest.mark.parametrize(
    ("prompt", "output"), [([], []), (list(range(64)), []), (list(range(60)), [1, 2, 3, 4])]
)
def test_a_request_that_can_never_run_is_refused_at_once(
    prompt: list[int], output: list[int]
) -> None:
    driver = Driver(4)
    with pytest.raises(InvalidRequestError):
        driver.add(make_request("a", prompt, output=output))
    assert not driver.scheduler.has_requests


def test_an_id_in_use_is_refused() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT))
    with pytest.raises(InvalidRequestError, match="in use"):
        driver.add(make_request("a", PROMPT))
    driver.run()
    driver.add(make_request("a", PROMPT))


def test_a_full_queue_refuses_by_name() -> None:
    driver = Driver(max_num_queued_reqs=2)
    driver.add(make_request("a", [1]), make_request("b", [1]))
    with pytest.raises(CapacityError):
        driver.add(make_request("c", [1]))


def test_a_resumed_request_goes_on_where_its_output_ends() -> None:
    whole = expected_output(PROMPT, 8)
    driver = Driver()
    driver.add(make_request("a", PROMPT, output=whole[:3], max_tokens=8))
    driver.run()
    assert sorted(driver.clients["a"].tokens) == [3, 4, 5, 6, 7]
    assert driver.clients["a"].output == whole[3:]
    assert driver.stats.prompt_tokens_local_compute == 40


def test_a_resumed_request_that_had_ended_ends_without_a_token() -> None:
    driver = Driver()
    whole = expected_output(PROMPT, 3)
    driver.add(make_request("a", PROMPT, output=whole, max_tokens=3))
    driver.run()
    assert driver.clients["a"].reason is FinishReason.LENGTH
    assert not driver.clients["a"].tokens


def test_an_abort_while_waiting_or_running_frees_all_and_tells_the_client() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request("a", PROMPT, max_tokens=50), make_request("b", PROMPT))
    driver.step()
    driver.scheduler.abort_requests(["a", "b", "never-seen"])
    driver.run()
    for request_id in "ab":
        assert driver.clients[request_id].reason is FinishReason.ABORT
    assert driver.stats.num_free_kv_blocks == 64
    assert not driver.executor.steps[-1]


def test_an_abort_while_a_step_runs_drops_that_steps_token() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT, max_tokens=50))
    step = driver.scheduler.schedule()
    driver.scheduler.abort_requests(["a"])
    output = driver.executor.execute_model(step)
    driver.update(step, output)
    driver.add(make_request("b", PROMPT))
    driver.run()
    assert driver.clients["a"].reason is FinishReason.ABORT
    assert not driver.clients["a"].tokens
    assert driver.clients["b"].output == expected_output(PROMPT, 4)


def test_the_runner_keeps_no_row_of_an_ended_request() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT), make_request("b", PROMPT, max_tokens=9))
    driver.run()
    driver.add(make_request("c", PROMPT, max_tokens=1))
    driver.step()
    assert set(driver.executor.rows) == {"c"}


def test_pending_tokens_are_the_prompt_tokens_not_yet_computed() -> None:
    driver = Driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT), make_request("b", list(range(10))))
    assert driver.stats.num_pending_tokens == 50
    driver.step()
    assert driver.stats.num_pending_tokens == 34
    driver.scheduler.abort_requests(["b"])
    assert driver.stats.num_pending_tokens == 24
    driver.run()
    assert driver.stats.num_pending_tokens == 0


def test_prompt_logprobs_of_all_chunks_come_once_with_the_first_token() -> None:
    driver = Driver(max_num_batched_tokens=16)
    driver.add(make_request("a", PROMPT, max_tokens=3, prompt_logprobs=0))
    received = []
    computed = 0
    while driver.scheduler.has_requests:
        step = driver.scheduler.schedule()
        output = driver.executor.execute_model(step)
        end = min(computed + step.num_scheduled_tokens["a"], len(PROMPT) - 1)
        output.prompt_logprobs["a"] = logprobs_of(PROMPT[computed + 1 : end + 1])
        computed = end
        driver.scheduler.update(step, output)
        outputs = driver.scheduler.take_outputs()
        received.append([logprobs.token_ids for logprobs in outputs.prompt_logprobs.values()])
    assert received == [[], [], [PROMPT[1:]], [], []]


def test_the_runner_is_asked_for_prompt_logprobs_only_while_they_are_due() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT, prompt_logprobs=2))
    driver.add(make_request("b", PROMPT, output=expected_output(PROMPT, 1), prompt_logprobs=2))
    new = {item.request_id: item for item in driver.scheduler.schedule().new_requests}
    assert new["a"].sampling_params.prompt_logprobs == 2
    assert new["b"].sampling_params.prompt_logprobs is None


def logprobs_of(token_ids: list[int]) -> TokenLogprobs:
    count = len(token_ids)
    return TokenLogprobs(width=1, token_ids=token_ids, logprobs=[-1.0] * count, ranks=[1] * count)
