"""Figures of a load: latencies as a client sees them, throughput, goodput, failures by name. Pure.

Names of metrics and of keys are those of the field's serving benchmarks. Beside them stand `ttst`,
the time to the second token, and `t12`, the gap between the first two, in which a hand-off shows.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diptych.bench.offline import percentile
from diptych.bench.serve_client import Answer
from diptych.bench.serve_run import Run

METRICS = {
    "ttft": "Time to First Token",
    "ttst": "Time to Second Token",
    "t12": "Token 1 to Token 2",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
# the load generator's own lateness beyond which its figures are in doubt
MOST_LATE_S = 0.001


def metrics_of(answer: Answer) -> dict[str, float]:
    """Seconds of one answer, of those metrics that it has; `itl` is one per gap and not here."""
    first, second = answer.token_s(1), answer.token_s(2)
    found = {"e2el": answer.end_s - answer.start_s}
    if first is not None:
        found["ttft"] = first - answer.start_s
        if answer.output_len > 1:
            found["tpot"] = (answer.piece_s[-1] - first) / (answer.output_len - 1)
        if second is not None:
            found["ttst"] = second - answer.start_s
            found["t12"] = second - first
    return found


def gaps_of(answer: Answer) -> list[float]:
    """Seconds between the pieces of an answer; tokens that came together are one piece."""
    pairs = zip(answer.piece_s, answer.piece_s[1:], strict=False)
    return [later - earlier for earlier, later in pairs]


def figures_of(
    run: Run,
    input_lens: Sequence[int | None],
    percentiles: Iterable[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """All figures of a run. `goodput`: metric to the most milliseconds that count as good."""
    good = [answer for answer in run.answers if answer.error is None]
    lens = [
        answer.prompt_tokens if answer.prompt_tokens is not None else length or 0
        for answer, length in zip(run.answers, input_lens, strict=True)
        if answer.error is None
    ]
    duration = run.end_s - run.begin_s
    total_in, total_out = sum(lens), sum(answer.output_len for answer in good)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "errors_by_name": dict(Counter(a.error for a in run.answers if a.error)),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        "max_output_tokens_per_s": _busiest_second(good, run.begin_s),
        "max_concurrent_requests": most_at_once(run.answers),
    }
    if goodput:
        met = sum(_meets(metrics_of(answer), goodput) for answer in good)
        found["request_goodput"] = met / duration
        found["goodput_share"] = met / len(run.answers)
    percents = sorted({50.0, *percentiles})
    for name, values in _samples(good).items():
        found |= _spread(name, values, percents)
    found |= _spread("schedule_lag", run.late_s, percents)
    found |= _spread("client_queue_time", run.queued_s, percents)
    return found


def _samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in METRICS}
    for answer in answers:
        for name, value in metrics_of(answer).items():
            samples[name].append(value)
        samples["itl"] += gaps_of(answer)
    return samples


def _spread(name: str, seconds: Sequence[float], percents: Iterable[float]) -> dict[str, float]:
    """Mean, deviation and percentiles in milliseconds; nothing of nothing."""
    if not seconds:
        return {}
    ms = [value * 1e3 for value in seconds]
    found = {f"mean_{name}_ms": statistics.fmean(ms), f"std_{name}_ms": statistics.pstdev(ms)}
    for percent in percents:
        at = percentile(ms, percent)
        found[f"{'median' if percent == 50 else f'p{percent:g}'}_{name}_ms"] = at
    return found


def _meets(metrics: Mapping[str, float], goodput: Mapping[str, float]) -> bool:
    """A metric that an answer does not have, for want of a second token, counts as met."""
    return all(metrics.get(name, 0.0) * 1e3 <= most_ms for name, most_ms in goodput.items())


def _busiest_second(answers: Sequence[Answer], begin_s: float) -> int:
    seconds: Counter[int] = Counter()
    for answer in answers:
        for at, tokens in zip(answer.piece_s, answer.piece_tokens, strict=True):
            seconds[int(at - begin_s)] += tokens
    return max(seconds.values(), default=0)


def most_at_once(answers: Sequence[Answer]) -> int:
    """Most requests that were under way together."""
    edges = [(a.start_s, 1) for a in answers] + [(a.end_s, -1) for a in answers]
    now = most = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def table(figures: Mapping[str, Any], names: Sequence[str], settings: Mapping[str, Any]) -> str:
    """What a person reads: the table that users of serving benchmarks know."""
    lines = [f"{' Serving Benchmark Result ':=^60}"]

    def line(title: str, value: Any) -> None:
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{title + ':':<46}{shown:>14}")

    line("Successful requests", figures["completed"])
    line("Failed requests", figures["failed"])
    for name, count in figures["errors_by_name"].items():
        line(f"  {name}", count)
    for way, count in figures.get("handoffs", {}).items():
        line(f"Hand-offs, {way}", count)
    for title, value in settings.items():
        line(title, value)
    line("Benchmark duration (s)", figures["duration"])
    line("Total input tokens", figures["total_input_tokens"])
    line("Total generated tokens", figures["total_output_tokens"])
    line("Request throughput (req/s)", figures["request_throughput"])
    if "request_goodput" in figures:
        line("Request goodput (req/s)", figures["request_goodput"])
        line("Share of requests that are good (%)", 100.0 * figures["goodput_share"])
    line("Output token throughput (tok/s)", figures["output_throughput"])
    line("Peak output token throughput (tok/s)", figures["max_output_tokens_per_s"])
    line("Peak concurrent requests", figures["max_concurrent_requests"])
    line("Total token throughput (tok/s)", figures["total_token_throughput"])
    for name in names:
        lines.append(f"{METRICS[name]:-^60}")
        lines += _metric_lines(figures, name, name.upper())
    if "mean_router_t12_ms" in figures:
        lines.append(f"{'Token 1 to Token 2, at the router':-^60}")
        lines += _metric_lines(figures, "router_t12", "T12")
    lines.append(f"{'Load generator':-^60}")
    lines += _metric_lines(figures, "schedule_lag", "schedule lag")
    lines.append("=" * 60)
    return "\n".join(lines)


def _metric_lines(figures: Mapping[str, Any], name: str, shown: str) -> list[str]:
    found = []
    for key, value in figures.items():
        kind, _, rest = key.partition("_")
        if rest == f"{name}_ms" and kind != "std":
            found.append(f"{f'{kind.capitalize()} {shown} (ms):':<46}{value:>14.2f}")
    return found
