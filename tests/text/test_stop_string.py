import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.text.detokenizer import IncrementalDetokenizer
from diptych.text.stop_string import StopString
from tests.text.vocabularies import byte_level


@given(stop=st.text("ab", min_size=1, max_size=6), text=st.text("ab", max_size=30))
def test_every_end_and_every_start_is_seen(stop: str, text: str) -> None:
    finder = StopString(stop)
    for end in range(1, len(text) + 1):
        assert finder.push(text[end - 1]) == text[:end].endswith(stop)
        starts = [n for n in range(len(stop) + 1) if text[:end].endswith(stop[:n])]
        assert finder.num_matched == max(starts)


@pytest.mark.timeout(150)
def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["s" * 20_000 + "x"])
    token = tokenizer.encode("s")
    pieces = [detokenizer.append(token).text for _ in range(30_000)]
    assert "".join(pieces) == "s" * 10_000
