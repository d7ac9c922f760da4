"""While KV is about to arrive the next step is planned as late as the device needs it: whoever
waits for the KV is in it. In virtual time, on a device whose steps take as long as they are told.
"""

from __future__ import annotations

import pytest

from diptych.engine.request import KVTransferParams
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from diptych.engine.step_times import StepTimes
from tests.engine.engine_driver import OverlapDriver
from tests.engine.fake_connector import FakeConnector, commit_of
from tests.engine.fake_executor import expected_output
from tests.engine.make_requests import make_request

PROMPT = list(range(20))
STEP_S, LAUNCH_S = 4e-3, 0.5e-3
COMMIT = KVTransferParams(commit=commit_of(len(PROMPT)))


class Time:
    """Steps end in their order, each so long after the one before, or after it was launched."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ends: list[float] = []

    def __call__(self) -> float:
        return self.now

    def launch(self) -> None:
        self.now += LAUNCH_S
        self.ends.append(max([self.now, *self.ends[-1:]]) + STEP_S)

    def wait(self) -> None:
        self.now = max(self.now, self.ends[0])

    def end(self) -> None:
        self.wait()
        self.ends.pop(0)


class TimedDriver(OverlapDriver):
    """`a` decodes; `b` waits for KV that a peer is about to have read."""

    def __init__(self) -> None:
        self.time = Time()
        self.peer = FakeConnector()
        super().__init__(connector=self.peer, monotonic=self.time)
        self.device.on_submit, self.device.on_wait = self.time.launch, self.time.wait
        work = self.device.execute_model

        def execute(step: SchedulerOutput) -> ModelRunnerOutput:
            self.time.end()
            return work(step)

        self.device.execute_model = execute  # type: ignore[method-assign]
        self.add(make_request("a", PROMPT, max_tokens=200))
        self.add(make_request("b", PROMPT, max_tokens=8, transfer=COMMIT))
        for _ in range(12):
            assert "b" not in self.step()
        assert self.peer.awaited == []

    def expect(self, in_s: float, arrives_s: float | None = None) -> None:
        """KV is announced to be here in so long; and is, unless it says otherwise."""
        assert self.transfers is not None
        transfers = self.transfers
        at_s = self.time.now + (in_s if arrives_s is None else arrives_s)
        self.peer.expects, self.peer.ready_s = True, self.time.now + in_s

        def wait() -> None:
            until_s, _ = self.peer.awaited[-1]
            if at_s > until_s:
                self.time.now = max(self.time.now, until_s)
                return
            self.time.now = max(self.time.now, at_s)
            self.peer.expects, self.peer.ready_s = False, 0.0
            self.peer.on_await = lambda: None
            transfers.arrive("b", expected_output(PROMPT, 1)[0])

        self.peer.on_await = wait

    def until_b(self, most: int = 10) -> int:
        """Steps begun until one has `b` in it."""
        for count in range(1, most + 1):
            if "b" in self.step():
                return count
        raise AssertionError("the KV is never used")


def test_kv_that_comes_while_a_step_runs_is_in_the_one_behind_it() -> None:
    driver = TimedDriver()
    driver.expect(2.5e-3)
    began_s = driver.time.now
    assert driver.until_b() == 1
    # the device had a step all the time: this one was given to it before the other ended
    assert driver.device.most_in_flight == 2
    assert driver.time.now - began_s <= STEP_S + LAUNCH_S
    driver.run()
    assert driver.clients["b"].tokens == dict(enumerate(expected_output(PROMPT, 8)[1:], 1))
    assert driver.clients["a"].output == expected_output(PROMPT, 200)


def test_a_step_is_planned_just_in_time_where_kv_does_not_come() -> None:
    driver = TimedDriver()
    driver.expect(3.0)
    for _ in range(5):
        end_s, before_s = driver.time.ends[0], driver.time.now
        assert driver.step() == {"a": 1}
        launched_s = driver.peer.awaited[-1][0] + LAUNCH_S
        assert end_s - 0.5e-3 < launched_s <= end_s
        assert driver.time.now - before_s == pytest.approx(STEP_S, rel=0.01)


def test_kv_that_comes_soon_after_a_step_is_waited_for_and_tokens_go_out_before() -> None:
    driver = TimedDriver()
    driver.expect(STEP_S + 1e-3)
    tokens = len(driver.clients["a"])
    assert driver.step() == {}
    assert len(driver.clients["a"]) == tokens + 1
    assert driver.device.in_flight == []
    assert driver.step() == {"a": 1, "b": 1}
    assert driver.peer.awaited[-1][1]


def test_nothing_is_waited_for_that_takes_longer_than_a_part_of_a_step() -> None:
    driver = TimedDriver()
    driver.expect(1.9 * STEP_S)
    assert driver.step() == {"a": 1}
    assert driver.device.in_flight


def test_kv_that_is_late_is_not_waited_for_again() -> None:
    driver = TimedDriver()
    driver.expect(STEP_S + 1e-3, arrives_s=10 * STEP_S)
    began_s = driver.time.now
    assert driver.step() == {}
    assert driver.step() == {"a": 1}
    assert driver.time.now - began_s < 2 * STEP_S
    driver.peer.ready_s = 0.0  # the connector expects it no more
    assert driver.step() == {"a": 1}


def test_peers_that_always_announce_and_never_deliver_cost_others_half_a_step_at_most() -> None:
    driver = TimedDriver()
    driver.expect(3.0)
    driver.peer.hold_until_s = lambda limit_s: limit_s  # type: ignore[method-assign]
    began_s, tokens = driver.time.now, len(driver.clients["a"])
    for _ in range(40):
        driver.step()
    num_steps = len(driver.clients["a"]) - tokens
    assert num_steps == 20  # each waits once
    most_s = num_steps * (1.5 * STEP_S + LAUNCH_S)
    assert driver.time.now - began_s <= most_s * 1.001


def test_what_came_is_in_the_next_step_though_another_is_in_flight() -> None:
    """Nobody expected it: a step is in flight, and this one is planned behind it."""
    driver = TimedDriver()
    assert driver.transfers is not None
    driver.transfers.arrive("b", expected_output(PROMPT, 1)[0])
    assert len(driver.device.in_flight) == 1
    assert driver.step() == {"a": 1, "b": 1}
    driver.run()
    assert driver.clients["b"].tokens == dict(enumerate(expected_output(PROMPT, 8)[1:], 1))


def test_the_end_of_a_step_that_nobody_saw_is_not_learned_from() -> None:
    time = Time()
    times = StepTimes(time)
    assert times.end_s is None
    begun_s = time.now
    time.now += LAUNCH_S
    times.launched(begun_s, decodes=True)
    assert times.end_s is None  # nothing is known of steps yet
    time.now += 1.0
    times.waited(time.now)  # it was over before
    times.settled()
    begun_s, time.now = time.now, time.now + LAUNCH_S
    times.launched(begun_s, decodes=True)
    assert times.end_s is None
    began_s, time.now = time.now, time.now + STEP_S
    times.waited(began_s)
    times.settled()
    times.launched(time.now, decodes=False)
    assert times.end_s is None  # a prompt's step is like no other
    times.waited(time.now)
    times.settled()
    times.launched(time.now, decodes=True)
    assert times.end_s == pytest.approx(time.now + STEP_S)
    assert times.most_held_s == pytest.approx(STEP_S / 2)
    # one that was over before anybody expected it tells that much
    time.now += STEP_S / 2
    times.waited(time.now)
    times.settled()
    times.launched(time.now, decodes=True)
    assert times.end_s == pytest.approx(time.now + STEP_S / 2)
