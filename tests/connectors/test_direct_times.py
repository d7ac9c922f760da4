"""Times of hand-offs, as they are told at the end."""

from __future__ import annotations

from diptych.connectors.base import StepStage
from diptych.connectors.direct_times import FirstSteps, HandoffTimes


def test_each_stage_is_told_by_its_median_and_its_slowest_hundredth() -> None:
    times = HandoffTimes()
    assert times.summary() == ""
    for number in range(101):
        times.add("read", number / 1e3)
    times.add("verdict", 0.0005)

    assert times.summary() == "read 50.00 (p99 99.00) ms, verdict 0.50 (p99 0.50) ms"


def test_only_the_last_are_kept() -> None:
    times = HandoffTimes()
    for _ in range(4096):
        times.add("read", 1.0)
    for _ in range(4096):
        times.add("read", 0.002)
    assert times.summary() == "read 2.00 (p99 2.00) ms"


def test_a_request_is_followed_until_its_first_token_here_is_sent() -> None:
    times, clock = HandoffTimes(), [0.0]
    steps = FirstSteps(lambda: clock[0], times)

    def note(stage: StepStage, *request_ids: str) -> None:
        clock[0] += 1e-3
        steps.note(stage, request_ids)

    steps.begin(["r", "ended"])
    steps.forget("ended")
    note(StepStage.KNOWN, "r")  # of a step that it was not in
    note(StepStage.WRITTEN)
    note(StepStage.SENT)
    note(StepStage.LAUNCHED, "r")
    note(StepStage.KNOWN, "r")
    steps.forget("r")  # that was its last token: it is sent all the same
    note(StepStage.SENT)
    assert times.summary() == ", ".join(
        f"{stage} {ms}.00 (p99 {ms}.00) ms"
        for stage, ms in (
            ("taken in to written", 2),
            ("written to launched", 2),
            ("launched to token 2", 1),
            ("token 2 to sent", 1),
        )
    )
    note(StepStage.LAUNCHED, "r", "ended")
    assert times.summary().count("ms") == 4


def test_who_ended_before_its_first_step_is_not_followed_for_ever() -> None:
    times, clock = HandoffTimes(), [0.0]
    steps = FirstSteps(lambda: clock[0], times)
    steps.begin(["r"])
    steps.note(StepStage.WRITTEN, ())
    steps.forget("r")  # as far as is known here it may be in the step that is about to be launched
    clock[0] += 11.0
    steps.begin(["s"])
    steps.note(StepStage.LAUNCHED, ["r"])
    assert "launched" not in times.summary()
    steps.note(StepStage.WRITTEN, ())
    steps.note(StepStage.LAUNCHED, ["s"])
    assert "written to launched" in times.summary()
