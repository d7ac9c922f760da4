"""Arguments of the offline benchmarks."""

from __future__ import annotations

import pytest

from diptych.cli import main


@pytest.mark.parametrize("flag", ["--num-iters", "--batch-size", "--input-len"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_count_of_nothing_is_refused_before_anything_runs(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "latency", flag, value])
    assert end.value.code == 2
    assert f"{flag}: {value!r} is not a number of 1 or more" in capsys.readouterr().err
