"""Whatever happens in whatever order: no block is lost or used twice, and every answer is right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.engine.request import EngineCoreRequest, FinishReason, KVTransferParams
from diptych.errors import InvalidRequestError
from tests.engine.engine_driver import Driver, FastLoadsDriver, OverlapDriver
from tests.engine.fake_connector import FakeConnector, commit_of
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request


@dataclass
class Engine:
    """What is drawn once per example."""

    driver: Driver
    requests: dict[str, EngineCoreRequest]


engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 9),
        "max_num_batched_tokens": st.integers(4, 64),
        "reserve_output": st.booleans(),
        "max_num_seqs": st.integers(1, 4),
        "long_prefill_token_threshold": st.sampled_from([0, 5, 16]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
    }
)
# what a store has of any prompt, and what a request computes of that while the rest is loaded
stores = st.builds(
    FakeConnector,
    available=st.sampled_from([0, 20, 1000]),
    beside=st.sampled_from([0, 1, 7, 16, 30]),
    reloads=st.booleans(),
)
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 2),  # whose prefix
            st.integers(1, 70),  # its length
            st.integers(1, 40),  # max_tokens
            st.sampled_from(["plain", "plain", "stop", "history", "send", "receive", "resume"]),
            st.integers(-2, 2),  # priority
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("abort in step"), st.integers(0, 30)),
        st.tuples(st.just("load ends"), st.sampled_from([None, None, 0, 7, 16, 40])),
        st.tuples(st.just("save ends"), st.sampled_from([None, 0, 16, 1000])),
        st.just(("step",)),
        st.just(("step",)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("make_driver", [Driver, OverlapDriver, FastLoadsDriver])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=engines, store=stores, steps=actions)
def test_no_block_is_lost_and_every_answer_is_right(
    make_driver: type[Driver],
    config: dict[str, object],
    store: FakeConnector,
    steps: list[tuple[object, ...]],
) -> None:
    engine = Engine(make_driver(connector=store, **config), {})
    for name, *arguments in steps:
        ACTIONS[name](engine, *arguments)
    finish(engine)
    driver = engine.driver
    assert driver.stats.num_free_kv_blocks == driver.stats.num_kv_blocks
    assert not driver.scheduler._waiting._requests
    assert driver.stats.num_pending_tokens == 0
    for request_id, request in engine.requests.items():
        check_answer(driver, request_id, request)


def add(
    engine: Engine, family: int, length: int, max_tokens: int, kind: str, priority: int
) -> None:
    request_id = f"r{len(engine.requests)}"
    prompt = [family, *range(length - 1)]
    output: list[int] = []
    transfer = None
    if kind == "send":
        transfer = KVTransferParams(do_remote_decode=True)
    elif kind == "receive":
        output, transfer = expected_output(prompt, 1), KVTransferParams(commit=commit_of(length))
    elif kind == "resume":
        output = expected_output(prompt, max(1, max_tokens // 2))
    request = make_request(
        request_id,
        prompt,
        output=output,
        max_tokens=max_tokens,
        priority=priority,
        transfer=transfer,
        stop_token_ids=expected_output(prompt, max_tokens)[-2:-1] if kind == "stop" else None,
        frequency_penalty=0.1 * (kind == "history"),
    )
    try:
        engine.driver.add(request)
    except InvalidRequestError:
        assert length + len(output) >= engine.driver.scheduler.max_model_len
        return
    engine.requests[request_id] = request


def abort(engine: Engine, index: int) -> None:
    engine.driver.abort(f"r{index}")


def step(engine: Engine) -> None:
    engine.driver.step()


def abort_in_step(engine: Engine, index: int) -> None:
    driver = engine.driver
    if isinstance(driver, OverlapDriver):
        driver.scheduler.abort_requests([f"r{index}"])  # whatever is in flight
        return
    planned = driver.scheduler.schedule()
    output = driver.transfers.execute_model(planned)
    abort(engine, index)
    driver.update(planned, output)
    driver.check()


def end_load(engine: Engine, valid: int | None) -> None:
    for request_id in sorted(engine.driver.connector.loads)[:1]:
        load = engine.driver.connector.loads[request_id]
        holds = None if valid is None or valid >= load.end else max(valid, load.start)
        engine.driver.transfers.finish_load(request_id, holds)


def end_save(engine: Engine, saved: int | None) -> None:
    for request_id in sorted(engine.driver.connector.sending)[:1]:
        if request_id in engine.driver.scheduler._requests:
            continue  # its step has not ended
        length = len(engine.requests[request_id].prompt_token_ids)
        commit = None if saved is None else commit_of(min(saved, length))
        engine.driver.transfers.finish_save(request_id, commit)


ACTIONS = {
    "add": add,
    "abort": abort,
    "abort in step": abort_in_step,
    "load ends": end_load,
    "save ends": end_save,
    "step": step,
}


def finish(engine: Engine) -> None:
    """All transfers end in time; then all requests do."""
    for _ in range(3000):
        if not engine.driver.has_work:
            return
        end_load(engine, None)
        end_save(engine, 1000)
        engine.driver.step()
    raise AssertionError("the engine does not come to an end")


def check_answer(driver: Driver, request_id: str, request: EngineCoreRequest) -> None:
    client = driver.clients[request_id]
    assert client.num_ends == 1
    given = len(request.output_token_ids)
    most = request.sampling_params.max_tokens or 0
    count = min(most, driver.scheduler.max_model_len - len(request.prompt_token_ids))
    whole = expected_output(request.prompt_token_ids, max(count, given))
    sent = [client.tokens[p] for p in sorted(client.tokens)]
    assert sent == whole[given : given + len(sent)]
    assert not client.tokens or min(client.tokens) == given
    stops = request.sampling_params.stop_token_ids or ()
    assert not any(token in stops for token in sent[:-1])
    if client.reason is FinishReason.STOP:
        assert sent[-1] in stops
    elif client.reason is FinishReason.LENGTH:
        assert given + len(sent) == max(count, given)
    elif client.commit is not None:
        assert len(sent) == 1
    else:
        assert client.reason is FinishReason.ABORT
