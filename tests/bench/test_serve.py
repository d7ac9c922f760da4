"""`diptych bench serve`, its pure parts: arrivals, events, figures, prompts, the comparison."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from diptych.bench.serve_arrivals import arrival_times
from diptych.bench.serve_check import compare, compare_digests, digest
from diptych.bench.serve_client import Answer
from diptych.bench.serve_events import ServerSentEvents, parse_event
from diptych.bench.serve_figures import figures_of, gaps_of, metrics_of, table
from diptych.bench.serve_prompts import RandomLengths, custom_loads, random_loads, trace_loads
from diptych.bench.serve_run import Run
from diptych.bench.serve_scrape import GAP, HANDOFFS, Snapshot
from diptych.cli import main
from diptych.errors import ConfigError, InvalidRequestError

VOCAB = range(1000)


def gap_variation(burstiness: float) -> float:
    times = arrival_times(4000, 10.0, burstiness, random.Random(0))
    gaps = [b - a for a, b in pairwise(times)]
    return statistics.stdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_those_of_a_gamma_distribution(burstiness: float) -> None:
    assert gap_variation(burstiness) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_every_seed_offers_the_same_load() -> None:
    for seed in range(3):
        times = arrival_times(50, 2.0, 1.0, random.Random(seed))
        assert times == sorted(times)
        assert times[-1] == pytest.approx(25.0)


def test_without_bursts_requests_come_at_equal_distances() -> None:
    assert arrival_times(4, 2.0, float("inf"), random.Random(0)) == [0.5, 1.0, 1.5, 2.0]


def test_at_an_infinite_rate_all_come_at_once() -> None:
    assert arrival_times(3, float("inf"), 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


def test_a_ramp_brings_more_at_its_end() -> None:
    times = arrival_times(100, 10.0, float("inf"), random.Random(0), ramp=4.0)
    assert times[-1] == pytest.approx(10.0)
    ratio = (times[1] - times[0]) / (times[-1] - times[-2])
    assert ratio == pytest.approx(4.0, rel=0.05)


STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\r\ndata: two\r\ndata:lines\r\n\r\ndata: [DONE]\n\n'


def test_events_are_the_same_however_the_stream_is_cut() -> None:
    for size in range(1, len(STREAM) + 1):
        events = ServerSentEvents()
        pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
        found = [event for piece in pieces for event in events.feed(piece)]
        assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_an_event_without_an_end_is_refused() -> None:
    events = ServerSentEvents()
    events.feed(b"x" * (4 << 20))
    with pytest.raises(InvalidRequestError, match="no end"):
        events.feed(b"x")


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        ({"choices": [{"index": 0, "text": "", "token_ids": [5, 6]}], "usage": None}, 2),
        ({"choices": [{"text": "ab"}]}, 1),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, 1),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, 0),
    ],
)
def test_tokens_of_an_event_are_its_ids_or_its_text(data: object, tokens: int) -> None:
    assert parse_event(json.dumps(data).encode()).num_tokens == tokens


def test_an_event_that_is_no_event_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not understood"):
        parse_event(b"[1, 2]")


def an_answer(
    start_s: float, pieces: list[tuple[float, int]], end_s: float, error: str | None = None
) -> Answer:
    ids = list(range(sum(tokens for _, tokens in pieces)))
    return Answer(
        start_s=start_s,
        end_s=end_s,
        piece_s=[at for at, _ in pieces],
        piece_tokens=[tokens for _, tokens in pieces],
        token_ids=ids,
        prompt_tokens=10,
        error=error,
    )


def test_latencies_of_an_answer_are_those_that_its_client_sees() -> None:
    answer = an_answer(1.0, [(1.5, 1), (2.0, 1), (2.25, 2)], 2.5)

    found = metrics_of(answer)

    assert found == {"e2el": 1.5, "ttft": 0.5, "ttst": 1.0, "t12": 0.5, "tpot": 0.25}
    assert gaps_of(answer) == [0.5, 0.25]


def test_two_tokens_that_come_together_have_no_gap() -> None:
    assert metrics_of(an_answer(0.0, [(1.0, 2)], 1.0))["t12"] == 0.0


def test_one_token_has_no_second_and_no_time_per_token() -> None:
    assert metrics_of(an_answer(0.0, [(1.0, 1)], 1.0)) == {"e2el": 1.0, "ttft": 1.0}


def a_run() -> Run:
    answers = [
        an_answer(0.0, [(0.1, 1), (0.2, 1)], 0.2),
        an_answer(0.1, [(0.4, 1), (0.5, 1)], 0.5),
        an_answer(0.15, [], 0.16, "429 rate_limit"),
    ]
    return Run(begin_s=0.0, end_s=2.0, answers=answers, late_s=[0.0] * 3, queued_s=[0.0] * 3)


def test_figures_count_what_went_well_and_name_what_did_not() -> None:
    found = figures_of(a_run(), [10, 10, 10], [99.0], {})

    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["errors_by_name"] == {"429 rate_limit": 1}
    assert found["request_throughput"] == 1.0
    assert found["total_token_throughput"] == 12.0
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 3
    assert found["mean_ttft_ms"] == pytest.approx(200.0)
    assert found["median_ttft_ms"] == pytest.approx(200.0)
    assert found["p99_ttft_ms"] == pytest.approx(299.0, abs=1.1)
    assert "Mean TTFT (ms):" in table(found, ["ttft"], {})
    assert "429 rate_limit" in table(found, ["ttft"], {})


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    found = figures_of(a_run(), [10, 10, 10], [99.0], {"ttft": 150.0, "tpot": 1000.0})
    assert found["request_goodput"] == 0.5
    assert found["goodput_share"] == pytest.approx(1 / 3)


def test_a_run_without_an_answer_has_figures_too() -> None:
    run = Run(begin_s=0.0, end_s=1.0, answers=[an_answer(0.0, [], 0.1, "timeout")])
    found = figures_of(run, [None], [99.0], {"ttft": 1.0})
    assert found["completed"] == 0
    assert "mean_ttft_ms" not in found
    assert "timeout" in table(found, ["ttft", "itl"], {})


def test_random_prompts_have_exactly_the_lengths_asked_for() -> None:
    lengths = RandomLengths(input_len=7, output_len=3, prefix_len=2)
    loads = random_loads(random.Random(0), 5, lengths, VOCAB)
    assert [len(load.prompt) for load in loads] == [9] * 5
    assert len({tuple(load.prompt[:2]) for load in loads}) == 1
    assert len({tuple(load.prompt) for load in loads}) == 5


def test_lengths_stay_within_their_range() -> None:
    lengths = RandomLengths(input_len=100, output_len=10, range_ratio=0.5)
    loads = random_loads(random.Random(0), 200, lengths, VOCAB)
    assert {len(load.prompt) for load in loads} <= set(range(50, 151))
    assert len({load.output_len for load in loads}) > 5


def write_trace(path: Path) -> Path:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 1600, "input_length": 1030, "output_length": 4, "hash_ids": [0, 9]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_a_trace_shares_its_prefixes_and_keeps_its_times(tmp_path: Path) -> None:
    first, second, third = trace_loads(9, write_trace(tmp_path / "t.jsonl.gz"), VOCAB, seed=0)

    assert [len(load.prompt) for load in (first, second, third)] == [1100, 1024, 1030]
    assert second.prompt == first.prompt[:1024]
    assert third.prompt[:512] == first.prompt[:512]
    assert third.prompt[512:] != first.prompt[512:1030]
    assert [load.due_s for load in (first, second, third)] == [0.0, 0.5, pytest.approx(0.6)]


def test_a_trace_can_be_scaled_to_a_small_model(tmp_path: Path) -> None:
    first, second, _ = trace_loads(3, write_trace(tmp_path / "t.jsonl.gz"), VOCAB, 0, 1 / 16)
    assert (len(first.prompt), len(second.prompt)) == (69, 64)
    assert second.prompt == first.prompt[:64]


def test_a_trace_of_lengths_only_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    loads = trace_loads(9, path, VOCAB, seed=0)
    assert [(len(load.prompt), load.output_len) for load in loads] == [(374, 44), (396, 109)]
    assert loads[1].due_s == pytest.approx(4.314579)


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"prompt": 3}', "[1]"])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match="line 1"):
        custom_loads(5, path, 8)
    with pytest.raises(ConfigError, match="line 1"):
        trace_loads(5, path, VOCAB, 0)


def test_lines_of_a_file_of_ones_own_say_how_long_their_answers_are(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": [1, 2]}\n{"prompt": "c"}\n')
    loads = custom_loads(2, path, 8)
    assert [(load.prompt, load.output_len) for load in loads] == [("a", 3), ([1, 2], 8)]


def test_answers_are_compared_up_to_their_first_difference() -> None:
    one, other = an_answer(0, [(1, 4)], 1), an_answer(0, [(1, 4)], 1)
    other.token_ids = [0, 1, 9, 3]
    failed = an_answer(0, [], 1, "timeout")

    found = compare([one, one, one], [one, other, failed])

    assert found == {
        "answers_checked": 2,
        "answers_equal": 1,
        "tokens_before_difference_share": 0.75,
        "tokens_before_difference": [4, 2],
    }
    reference = [digest(one), digest(one), digest(failed)]
    assert compare_digests([one, other, one], reference) == {
        "reference_checked": 2,
        "reference_equal": 1,
    }


def page(fast: int, slow: int) -> str:
    return (
        f"# TYPE {GAP} histogram\n"
        f'{GAP}_bucket{{le="0.01",model_name="m"}} {fast}\n'
        f'{GAP}_bucket{{le="0.02",model_name="m"}} {fast + slow}\n'
        f'{GAP}_bucket{{le="+Inf",model_name="m"}} {fast + slow}\n'
        f'{GAP}_sum{{model_name="m"}} {fast * 0.005 + slow * 0.015}\n'
        f'{GAP}_count{{model_name="m"}} {fast + slow}\n'
        f"# TYPE {HANDOFFS}_total counter\n"
        f'{HANDOFFS}_total{{way="direct",result="done"}} {fast + slow}\n'
        f'{HANDOFFS}_total{{way="store",result="done"}} 3\n'
    )


def test_what_a_server_counted_before_the_run_is_not_in_its_figures() -> None:
    before, after = Snapshot.of(page(100, 0)), Snapshot.of(page(108, 2))

    found = after.since(before).figures("t12", [90.0])

    assert found["mean_t12_ms"] == pytest.approx(7.0)
    assert found["median_t12_ms"] == pytest.approx(6.25)
    assert found["p90_t12_ms"] == pytest.approx(15.0)
    assert found["handoffs"] == {"direct done": 10}
    assert Snapshot.of("").figures("t12", []) == {}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--goodput", "ttft"], "not METRIC:MS"),
        (["--goodput", "speed:3"], "known are"),
        (["--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["--reference", "/does/not/exist"], "no answers"),
        (["--", "--handoff", "direct"], "need --up"),
    ],
)
def test_what_is_wrong_with_the_flags_is_said(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 1
    assert reason in capsys.readouterr().err
