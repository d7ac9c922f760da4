import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.text.detokenizer import IncrementalDetokenizer
from diptych.text.tokenizer import Tokenizer
from tests.text.vocabularies import END, byte_level, sentence_piece, word_level

BYTES, PIECES, WORDS = byte_level(), sentence_piece(), word_level()
TEXT = st.text(
    st.sampled_from([*"helostpan d.", "é", "世", "界", "👩", "\u200d", "🔬", "\n", "\ufffd"]),
    max_size=40,
)


def stream(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], **kwargs: object
) -> tuple[str, str | None, int]:
    """Feed `ids` in runs of the lengths of `cuts` (then one by one) and join what comes out."""
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    lengths, parts, stop, at = list(cuts), [], None, 0
    while at < len(ids) and stop is None:
        length = max(1, lengths.pop(0)) if lengths else 1
        text, stop, _ = detokenizer.append(ids[at : at + length])
        parts.append(text)
        at += length
    last = detokenizer.finish()
    parts.append(last.text)
    assert "".join(parts) == detokenizer.text
    return detokenizer.text, last.stop, detokenizer.num_tokens


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40),
    cuts=st.lists(st.integers(1, 5)),
)
def test_pieces_of_any_byte_level_tokens_join_to_the_full_decode(
    ids: list[int], cuts: list[int]
) -> None:
    assert stream(BYTES, ids, cuts)[0] == BYTES.decode(ids)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(1, 5)))
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentence-piece"])
def test_pieces_of_any_text_join_to_the_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    prompt = tokenizer.encode("a")
    ids = (
        tokenizer.encode("a" + text)[len(prompt) :]
        if tokenizer is PIECES
        else tokenizer.encode(text)
    )
    assert stream(tokenizer, ids, cuts, prompt_token_ids=prompt)[0] == text


def test_words_of_another_decoder_join_to_the_full_decode() -> None:
    ids = WORDS.encode("the car ! now stopping the car")
    prompt, output = ids[:2], ids[2:]
    text, _, _ = stream(WORDS, output, [], prompt_token_ids=prompt)
    assert WORDS.decode(prompt) + text == WORDS.decode(ids)


@pytest.mark.parametrize("text", ["👩\u200d🔬 works", "世界", "é"])
def test_no_piece_shows_part_of_a_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.append([i]).text for i in BYTES.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_is_never_finished_shows_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.append(BYTES.encode("ok 🔬")[:-1]).text == "ok "
    assert detokenizer.finish().text == "\ufffd"


def cut_at_first_end(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The meaning of stop strings: read character by character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=TEXT,
    stops=st.lists(st.text("helostp 世", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5)),
    include=st.booleans(),
)
def test_text_is_cut_where_the_first_stop_string_is_complete(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ids = BYTES.encode(text)
    got, stop, num_tokens = stream(BYTES, ids, cuts, stop=stops, include_stop_str_in_output=include)
    wanted, wanted_stop = cut_at_first_end(text, stops, include)
    assert (got, stop) == (wanted, wanted_stop)
    if stop is not None:
        without_last = cut_at_first_end(
            BYTES.decode(ids[: num_tokens - 1]).rstrip("\ufffd"), stops, include
        )
        assert without_last[1] is None, "a token past the stop was counted"


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["stop!"])
    given = {char: detokenizer.append(BYTES.encode(char)).text for char in ("a", "s", "t", "x")}
    assert given == {"a": "a", "s": "", "t": "", "x": "stx"}


def test_a_stop_string_within_min_tokens_is_plain_text() -> None:
    ids = [BYTES.encode(c)[0] for c in "xstopxstopx"]
    text, stop, num_tokens = stream(BYTES, ids, [], stop=["stop"], min_tokens=5)
    assert (text, stop, num_tokens) == ("xstopx", "stop", 10)


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = [*BYTES.encode("hello"), *BYTES.encode(END), *BYTES.encode(" a")]
    assert stream(BYTES, ids, [])[0] == "hello a"
    assert stream(BYTES, ids, [], skip_special_tokens=False)[0] == f"hello{END} a"


def test_a_stop_token_counts_but_has_no_text() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    delta = detokenizer.append(BYTES.encode("hello and"), silent_last=True)
    assert (delta.text, delta.num_tokens) == ("hello ", len(BYTES.encode("hello and")))


def test_a_stop_token_shows_where_stops_are_included() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, include_stop_str_in_output=True)
    assert detokenizer.append(BYTES.encode("hello and"), silent_last=True).text == "hello and"


def test_long_junk_does_not_pile_up() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    lone = BYTES.encode("é")[1]
    pieces = [detokenizer.append([lone]).text for _ in range(50)]
    assert "".join(pieces).count("\ufffd") >= 49
