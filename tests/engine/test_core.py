import pytest

from diptych.config import EngineConfig
from diptych.engine.core import EngineCore, EngineState
from diptych.engine.request import EngineCoreOutputs, FinishReason
from diptych.errors import EngineDeadError
from tests.engine.fake_connector import FakeConnector, FakeTransfers, Served
from tests.engine.fake_executor import FakeExecutor, expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(40))


def run(core: EngineCore) -> list[EngineCoreOutputs]:
    seen = []
    while core.has_work:
        outputs = core.step()
        if outputs is not None:
            seen.append(outputs)
    return seen


def test_a_core_steps_until_its_requests_have_ended() -> None:
    core = EngineCore(EngineConfig(), FakeExecutor())
    assert not core.has_work
    core.add_request(make_request("a", PROMPT))
    tokens = [token for outputs in run(core) for token in outputs.token_ids]
    assert tokens == expected_output(PROMPT, 4)
    assert not core.has_work


def test_every_chunk_of_a_long_prompt_reports_its_load() -> None:
    core = EngineCore(EngineConfig(max_num_batched_tokens=16), FakeExecutor())
    core.add_request(make_request("a", PROMPT, max_tokens=1))
    pending = [outputs.stats.num_pending_tokens for outputs in run(core)]
    assert pending == [24, 8, 0]


def test_an_abort_is_reported_without_running_a_step_on_the_device() -> None:
    executor = FakeExecutor()
    core = EngineCore(EngineConfig(), executor)
    core.add_request(make_request("a", PROMPT))
    core.abort(["a"])
    (outputs,) = run(core)
    assert outputs.finish_reasons == [FinishReason.ABORT]
    assert not executor.steps


def test_a_failing_executor_ends_every_request_and_names_the_state() -> None:
    core = EngineCore(EngineConfig(max_num_seqs=1), FakeExecutor(fail_at=1))
    core.add_request(make_request("a", PROMPT))
    core.add_request(make_request("b", PROMPT))
    outputs = run(core)[-1]
    assert sorted(outputs.request_ids) == ["a", "b"]
    assert outputs.finish_reasons == [FinishReason.ERROR] * 2
    assert "RuntimeError: the device is gone" in outputs.errors[0]
    assert core.state is EngineState.FAILED
    assert not core.has_work
    with pytest.raises(EngineDeadError, match="the device is gone"):
        core.add_request(make_request("c", PROMPT))


def test_a_failing_connector_ends_every_request_by_name_too() -> None:
    class Broken(FakeConnector):
        def get_num_new_matched_tokens(self, *_: object) -> tuple[int, bool]:
            raise OSError("the directory is gone")

    core = EngineCore(EngineConfig(), FakeExecutor(), Broken())
    core.add_request(make_request("a", PROMPT))
    (outputs,) = run(core)
    assert outputs.finish_reasons == [FinishReason.ERROR]
    assert "OSError: the directory is gone" in outputs.errors[0]
    assert core.state is EngineState.FAILED


def test_while_only_transfers_are_under_way_the_core_says_so_and_repeats_nothing() -> None:
    executor, connector = FakeExecutor(), FakeConnector(available=1000)
    transfers = FakeTransfers(executor, connector)
    core = EngineCore(EngineConfig(), Served(executor, transfers), connector)
    core.add_request(make_request("a", PROMPT))
    assert core.step() is not None
    assert core.is_waiting_for_transfers
    assert core.step() is None
    assert core.has_work
    transfers.finish_load("a")
    core.step()
    assert not core.is_waiting_for_transfers  # it computes in the next step
    run(core)
    assert not core.is_waiting_for_transfers
    assert core.stats.prompt_tokens_local_compute == 1


def test_closing_releases_the_executor_once() -> None:
    executor = FakeExecutor()
    core = EngineCore(EngineConfig(), executor)
    core.close()
    core.close()
    assert executor.closed
    with pytest.raises(EngineDeadError, match="closed"):
        core.add_request(make_request("a", PROMPT))
