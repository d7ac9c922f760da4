"""The flags of `diptych bench serve`: those of the field's serving benchmarks where they exist."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from diptych.bench.offline import count
from diptych.bench.serve_figures import METRICS

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    _add_server(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_result(parser.add_argument_group("figures"))


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server")
    add("--backend", choices=sorted(ENDPOINTS), default="openai", help="which of its APIs")
    add("--model", help="name in the API, the server's first if absent; with --up as `diptych up`")
    add("--served-model-name", help="name in the API, where --model says where the files lie")
    add("--tokenizer", help="model directory with the tokenizer and the vocabulary's size")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of every request")
    add("--api-key", default=os.environ.get("DIPTYCH_API_KEY"), help="sent as a bearer token")
    add("--ready-check-timeout-sec", type=float, default=0.0, help="seconds to wait for the server")
    add("--request-timeout", type=float, default=600.0, help="seconds until a request is given up")
    add("--metrics-url", help="the router's /metrics: its own view of the first two tokens' gap")
    add("--up", action="store_true", help="start a system on this machine, as `diptych up` does")
    add("--aggregated", action="store_true", help="with --up: one engine, as `diptych serve`")
    add("--up-timeout", type=float, default=300.0, help="seconds until it must be ready")
    add("up_flags", nargs="*", metavar="-- UP_FLAG", help="flags of `diptych up`, after a `--`")


def _add_dataset(group: Any) -> None:
    add = group.add_argument
    names = ["random", "sharegpt", "trace", "custom"]
    add("--dataset-name", choices=names, default="random")
    add("--dataset-path", type=Path, help="file of the other three (.gz too for traces and custom)")
    add("--num-prompts", type=count, default=1000, help="requests")
    add("--random-input-len", type=count, default=1024, help="prompt tokens, exactly")
    add("--random-output-len", type=count, default=128, help="most tokens of an answer")
    add("--random-range-ratio", type=_share, default=0.0, help="share by which lengths vary")
    add("--random-prefix-len", type=int, default=0, help="further tokens that all prompts share")
    add("--vocab-size", type=count, help="token ids are drawn below it; the model's if absent")
    add("--sharegpt-output-len", type=count, help="tokens of an answer; the recorded one's")
    add("--custom-output-len", type=count, default=256, help="where a line does not say")
    add("--trace-length-scale", type=float, default=1.0, help="times which a trace's lengths count")
    add("--trace-speed", type=float, default=1.0, help="times as fast as it was recorded")
    add("--ignore-eos", action="store_true", help="answers are as long as asked for")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--extra-body", type=_object, default={}, help="JSON object that every body gets")
    add(
        "--return-token-ids",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for token ids, so that tokens are counted exactly",
    )


def _add_traffic(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=_positive, default=float("inf"), help="requests/s; inf: all at once")
    add("--burstiness", type=_positive, default=1.0, help="1: Poisson; less: bursts; more: even")
    add("--ramp", type=_positive, default=1.0, help="rate at the end over that at the start")
    add("--max-concurrency", type=count, help="most requests under way")
    add("--num-warmups", type=int, default=2, help="requests before, one by one, not counted")
    add("--settle", type=float, default=0.0, help="seconds after them: GPU hosts pin memory then")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--disable-tqdm", action="store_true", help="show no progress")


def _add_result(group: Any) -> None:
    add = group.add_argument
    add("--percentile-metrics", type=_metrics, default=list(METRICS), help=",".join(METRICS))
    add("--metric-percentiles", type=_percentiles, default=[99.0], help="such as 50,90,99")
    add("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="such as ttft:200 tpot:10")
    add("--check", type=int, default=0, metavar="N", help="send N requests again, one by one, and "
        "compare the answers")  # fmt: skip
    add("--reference", type=Path, help="compare answers with those of an earlier --save-detailed")
    add("--save-result", action="store_true", help="write a dated record into --result-dir")
    add("--save-detailed", action="store_true", help="with the times of every request")
    add("--result-dir", type=Path, default=Path("bench/results"))
    add("--output-json", type=Path, help="write the record to this file")
    add("--label", default="", help="part of the record's name")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: each must be from 0 to 100")
    return values
