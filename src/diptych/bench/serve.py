"""`diptych bench serve`: load on an OpenAI endpoint, and what its clients see of it.

Against a server that runs, or one of its own (`--up`). docs/benchmarks.md has the definitions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from diptych.bench.deployment import Deployment
from diptych.bench.offline import report, say
from diptych.bench.serve_check import compare, compare_digests, digest
from diptych.bench.serve_client import StreamClient
from diptych.bench.serve_figures import METRICS, MOST_LATE_S, figures_of, gaps_of, metrics_of, table
from diptych.bench.serve_flags import ENDPOINTS, add_arguments
from diptych.bench.serve_prompts import Load
from diptych.bench.serve_requests import (
    body_of,
    due_times,
    files_of,
    headers_of,
    is_shape,
    make_loads,
    warm_up_loads,
)
from diptych.bench.serve_run import Run, run_load
from diptych.bench.serve_scrape import Snapshot, scrape
from diptych.errors import ConfigError, UnavailableError
from diptych.launcher.plan import Machine

__all__ = ["add_arguments", "main"]


def main(args: argparse.Namespace) -> int:
    """Load the server, print the table, write the record. 1 where no request went well."""
    goodput = _goodput(args.goodput)
    reference = _reference(args.reference)
    with _server(args) as target:
        loads = make_loads(args)
        run, again, gap = uvloop.run(_measure(args, target, loads))
    lens = [len(load.prompt) if isinstance(load.prompt, list) else None for load in loads]
    percentiles = {99.0, *args.metric_percentiles}  # the load generator's own is always told
    figures = target.facts | figures_of(run, lens, percentiles, goodput)
    figures |= gap.figures("router_t12", percentiles)
    if again is not None:
        figures |= compare(run.answers, again.answers)
    if reference is not None:
        figures |= compare_digests(run.answers, reference)
    shown = {
        "Request rate configured (RPS)": args.request_rate,
        "Maximum request concurrency": args.max_concurrency or "none",
    }
    shown |= {name: figures[name] for name in figures if name.startswith(("answers_", "reference"))}
    _write(args, figures | (_details(run) if args.save_detailed else {}))
    _warn(args, figures)
    say(table(figures, args.percentile_metrics, shown))
    return 0 if figures["completed"] else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A server, the model's name there, and what is known of one that was started for this."""

    url: str
    model: str
    metrics_url: str | None
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[_Target]:
    if not args.up:
        if args.up_flags:
            raise ConfigError("flags after `--` are those of `diptych up`: they need --up")
        model = asyncio.run(_ask_model(args))
        yield _Target(url=args.base_url, model=model, metrics_url=args.metrics_url)
        return
    args.model = args.model or "smollm2"
    name = args.served_model_name or args.model
    flags = ["--model", str(files_of(args) if is_shape(args.model) else args.model)]
    if is_shape(args.model):
        flags += ["--load-format", "dummy"]
    flags += ["--served-model-name", name, *args.up_flags]
    with Deployment("serve" if args.aggregated else "up", flags) as deployment:
        deployment.wait_ready(args.up_timeout)
        yield _Target(
            url=deployment.url,
            model=name,
            metrics_url=deployment.metrics_url,
            facts={"ready_s": deployment.ready_s, "up_flags": args.up_flags},
        )


async def _ask_model(args: argparse.Namespace) -> str:
    """The name under which the server serves.

    Raises:
        UnavailableError: it does not answer.
    """
    deadline = time.monotonic() + args.ready_check_timeout_sec
    named = args.served_model_name or args.model
    async with aiohttp.ClientSession(headers=headers_of(args)) as session:
        while True:
            try:
                async with session.get(
                    f"{args.base_url}/v1/models", timeout=aiohttp.ClientTimeout(total=10.0)
                ) as response:
                    response.raise_for_status()
                    body = await response.json()
                return str(named or body["data"][0]["id"])
            except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
                if time.monotonic() >= deadline:
                    reason = str(error) or type(error).__name__
                    raise UnavailableError(f"{args.base_url} does not answer: {reason}") from None
            await asyncio.sleep(0.2)


async def _measure(
    args: argparse.Namespace, target: _Target, loads: Sequence[Load]
) -> tuple[Run, Run | None, Snapshot]:
    """Warm up, load, and send again what is to be checked. The last is the router's own count."""
    bodies = [body_of(args, target.model, load) for load in loads]
    warm = [body_of(args, target.model, load) for load in warm_up_loads(args, loads)]
    url = target.url + ENDPOINTS[args.backend]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        client = StreamClient(session, url, headers_of(args), args.request_timeout)
        for answer in (await run_load(client, warm, [0.0] * len(warm), 1)).answers:
            if answer.error is not None:
                raise UnavailableError(f"a warm-up request failed: {answer.error}")
        await asyncio.sleep(args.settle)
        before = await scrape(session, target.metrics_url)
        due_s = due_times(args, loads)
        with _quiet_garbage():
            run = await run_load(client, bodies, due_s, args.max_concurrency, _progress(args))
        gap = (await scrape(session, target.metrics_url)).since(before)
        again = None
        if args.check:
            some = bodies[: args.check]
            again = await run_load(client, some, [0.0] * len(some), 1)
    return run, again, gap


def _goodput(items: Sequence[str]) -> dict[str, float]:
    known = [name for name in METRICS if name != "itl"]
    found = {}
    for item in items:
        name, _, most = item.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            raise ConfigError(f"--goodput {item} is not METRIC:MS") from None
        if name not in known:
            raise ConfigError(f"--goodput {item}: known are {', '.join(known)}")
    return found


def _reference(path: Path | None) -> list[str | None] | None:
    if path is None:
        return None
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["output_digests"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{path} has no answers of a --save-detailed: {error!r}") from None


@contextmanager
def _quiet_garbage() -> Iterator[None]:
    """Collections look at what the run makes only, not at the prompts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _progress(args: argparse.Namespace) -> Any:
    if args.disable_tqdm or not sys.stderr.isatty():
        return lambda done: None
    from tqdm import tqdm

    bar = tqdm(total=args.num_prompts, file=sys.stderr)
    return lambda done: bar.update(1)


def _details(run: Run) -> dict[str, Any]:
    """Of every request, in their order."""
    metrics = [metrics_of(answer) for answer in run.answers]
    return {
        **{f"{name}s": [m.get(name) for m in metrics] for name in METRICS if name != "itl"},
        "input_lens": [answer.prompt_tokens for answer in run.answers],
        "output_lens": [answer.output_len for answer in run.answers],
        "start_times": [answer.start_s - run.begin_s for answer in run.answers],
        "itls": [gaps_of(answer) for answer in run.answers],
        "errors": [answer.error for answer in run.answers],
        "output_digests": [digest(answer) for answer in run.answers],
    }


def _write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    settings = argparse.Namespace(**vars(args))
    if not args.save_result:
        settings.result_dir = None
    settings.api_key = settings.header = None
    settings.dataset_path = args.dataset_path and str(args.dataset_path)
    settings.goodput = " ".join(args.goodput)
    if settings.request_rate == float("inf"):
        settings.request_rate = "inf"  # JSON has no infinity
    device = "cuda" if args.up and Machine.here().num_gpus else "cpu"
    report("-".join(filter(None, ["serve", args.label])), settings, device, figures)


def _warn(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    late_ms = figures.get("p99_schedule_lag_ms", 0.0)
    paced = args.request_rate != float("inf") or args.dataset_name == "trace"
    if paced and late_ms > MOST_LATE_S * 1e3:
        say(
            f"WARNING: the load generator was late: {late_ms:.2f} ms at p99, and its figures are"
            " in doubt by as much"
        )
