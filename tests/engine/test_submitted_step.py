"""Waiting for a step that a device has been given, with a device that is told when to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from diptych.connectors.base import KVConnectorOutput, KVConnectorWorker
from diptych.engine.submitted_step import SubmittedStep


@dataclass
class Read:
    """A step's tokens; the step is over after some looks."""

    looks: int
    waited: bool = False

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


@dataclass
class Sends:
    """A connector whose hand-offs end after some looks."""

    sent: list[KVConnectorOutput | None] = field(default_factory=list)

    def take_sent(self) -> KVConnectorOutput | None:
        return self.sent.pop(0) if self.sent else None


def given(read: Read | None, connector: Sends) -> SubmittedStep:
    step = SubmittedStep(cast(Any, None), cast(KVConnectorWorker, connector), None)
    if read is not None:
        step.expect(cast(Any, read))
    return step


def test_a_save_that_ends_first_is_given_before_the_step_is_over() -> None:
    sent = KVConnectorOutput(finished_sending={"a"})
    read = Read(looks=1000)
    step = given(read, Sends([None, None, sent]))
    assert step.wait(saving=True) is sent
    assert not read.waited


def test_a_step_that_ends_first_is_waited_for_and_gives_no_save() -> None:
    read = Read(looks=2)
    assert given(read, Sends()).wait(saving=True) is None
    assert read.waited
    assert given(None, Sends()).wait(saving=True) is None


def test_where_nothing_is_saved_nobody_looks() -> None:
    read, sends = Read(looks=1000), Sends([KVConnectorOutput(finished_sending={"a"})])
    assert given(read, sends).wait(saving=False) is None
    assert read.waited
    assert sends.sent
