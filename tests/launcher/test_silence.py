"""A person hears early, and once, of a service that does not answer."""

from __future__ import annotations

from diptych.launcher.silence import Silence, silent_service

REASON = "Redis at redis://127.0.0.1:1 does not answer: refused"


def test_what_lasts_is_told_once() -> None:
    told: list[str] = []
    silence = Silence(told.append)
    for now_s in range(60):
        silence.heard(f"not registered yet: {REASON}\nmore" if now_s else "starting", float(now_s))
        assert len(told) == (now_s >= 4)
    assert told == [f"not registered yet: {REASON}"]


def test_neither_what_passes_nor_a_model_that_loads_is_told() -> None:
    told: list[str] = []
    silence = Silence(told.append)
    for now_s in range(60):
        silence.heard(REASON if now_s % 3 else "the engine is loading", float(now_s))
    assert told == []


def test_one_silent_service_is_one_however_it_is_told() -> None:
    ways = [REASON, f"not registered yet: {REASON}", REASON.replace("refused", "TimeoutError")]
    assert {silent_service(way) for way in ways} == {"Redis at redis://127.0.0.1:1"}
