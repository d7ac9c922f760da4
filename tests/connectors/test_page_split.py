"""Where a prefix is cut into a part that is computed and one that is loaded meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.connectors.page_split import Prefix, Speeds, best_cut, predicted_s

seconds = st.floats(1e-6, 1e-1)
speeds = st.builds(
    Speeds, seconds, seconds, st.floats(0.0, 2.0), st.sampled_from([math.inf, math.inf, 10.0, 0.5])
)
prefixes = st.builds(
    lambda start, count, after, ahead: Prefix(start, start + count, after, ahead),
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.integers(1, 3000),
    st.sampled_from([0, 0, 0, 100, 5000]),
)


def pages(prefix: Prefix) -> range:
    return range((prefix.start // 64 + 1) * 64, prefix.end, 64)


@given(prefixes, speeds)
def test_a_cut_is_a_page_or_an_end_and_never_worse_than_all_of_either(
    prefix: Prefix, speeds: Speeds
) -> None:
    cut = best_cut(prefix, pages(prefix), speeds)
    assert cut in (prefix.start, prefix.end) or cut in pages(prefix)
    pure = min(predicted_s(prefix, end, speeds) for end in (prefix.start, prefix.end))
    assert predicted_s(prefix, cut, speeds) <= pure


@given(prefixes, speeds)
def test_no_other_cut_is_much_better(prefix: Prefix, speeds: Speeds) -> None:
    chosen = predicted_s(prefix, best_cut(prefix, pages(prefix), speeds), speeds)
    best = min(
        predicted_s(prefix, cut, speeds) for cut in (prefix.start, *pages(prefix), prefix.end)
    )
    assert chosen <= best / 0.9 * (1 + 1e-9)


@given(prefixes, speeds)
def test_what_is_cut_gains_a_tenth_and_no_page_is_better(prefix: Prefix, speeds: Speeds) -> None:
    cut = best_cut(prefix, pages(prefix), speeds)
    if cut in (prefix.start, prefix.end):
        return
    chosen = predicted_s(prefix, cut, speeds)
    assert chosen < 0.9 * predicted_s(prefix, prefix.start, speeds)
    assert chosen < 0.9 * predicted_s(prefix, prefix.end, speeds)
    best = min(predicted_s(prefix, page, speeds) for page in pages(prefix))
    assert chosen == pytest.approx(best)


@given(prefixes, speeds, st.floats(1.0, 100.0), st.sampled_from(["load", "compute", "queue"]))
def test_the_slower_the_load_the_later_the_cut_and_the_slower_computing_the_earlier(
    prefix: Prefix, speeds: Speeds, factor: float, what: str
) -> None:
    """Of two that are cut in between; and from all of one way to all of the other."""
    slower = {
        "load": replace(speeds, load_s=speeds.load_s * factor),
        "compute": replace(speeds, compute_s=speeds.compute_s * factor),
        "queue": replace(speeds, load_begin_s=speeds.load_begin_s + factor),
    }[what]
    one, two = (best_cut(prefix, pages(prefix), each) for each in (speeds, slower))
    if what == "compute":
        one, two = two, one
    ends = (prefix.start, prefix.end)
    if (one in ends) == (two in ends):
        assert one <= two


@pytest.mark.parametrize("load_s", [1e-7, 1e-6])
def test_a_store_much_faster_than_the_model_is_loaded_whole(load_s: float) -> None:
    """128 KiB a token from a pool of the host, at 130 GB/s and at more, against 20,000 tokens/s."""
    speeds = Speeds(compute_s=5e-5, load_s=load_s, load_begin_s=0.004)
    for count in (1024, 8192, 65536):
        prefix = Prefix(0, count, num_after=64)
        assert best_cut(prefix, pages(prefix), speeds) == 0


def test_a_store_much_slower_than_the_model_is_not_asked() -> None:
    prefix = Prefix(0, 4096, num_after=64)
    assert best_cut(prefix, pages(prefix), Speeds(1e-4, 1e-2, 0.004)) == 4096
    assert best_cut(prefix, pages(prefix), Speeds(1e-4, 1e-5, 2.0)) == 4096


def test_equals_meet_in_the_middle() -> None:
    prefix = Prefix(48, 4096, num_after=64)
    assert best_cut(prefix, pages(prefix), Speeds(1e-3, 1e-3, 0.0)) in (2048, 2112)


def test_within_one_page_there_is_nothing_to_cut() -> None:
    prefix = Prefix(0, 63, num_after=1)
    assert best_cut(prefix, pages(prefix), Speeds(1e-3, 1e-3, 0.0)) in (0, 63)


def test_no_load_is_begun_that_would_be_given_up() -> None:
    prefix = Prefix(0, 4096, num_after=64)
    equal = Speeds(1e-2, 1e-2, 0.0, load_most_s=8.0)
    assert best_cut(prefix, pages(prefix), equal) == 4096 - 768  # 8 s of 20 s
    assert best_cut(prefix, (), replace(equal, load_s=5e-3)) == 4096
    assert best_cut(prefix, (), replace(equal, load_s=1e-3)) == 0
