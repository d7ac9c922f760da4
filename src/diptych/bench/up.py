"""`diptych bench up`: what the whole system on one machine costs: start-up, memory, first token."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diptych.bench.deployment import Deployment
from diptych.bench.report import write_result
from diptych.launcher.plan import Machine

_POLL_S = 0.1
_QUESTION = "What is the capital of France?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default="smollm2", help="as for `diptych up`")
    add("--num-requests", type=int, default=16, help="streamed chats, after one to warm up")
    add("--concurrency", type=int, default=8, help="chats at once")
    add("--max-tokens", type=int, default=64, help="most tokens of each answer")
    add("--ready-timeout", type=float, default=300.0, help="seconds until it must be ready")
    add("--result-dir", default="bench/results", help="where the JSON goes")


def main(args: argparse.Namespace) -> int:
    """Start `diptych up`, load it, stop it, report."""
    with Deployment("up", ["--model", args.model]) as deployment:
        memory = _MemoryWatch(deployment.pid)
        try:
            deployment.wait_ready(args.ready_timeout)
            idle_bytes = memory.now()
            first_tokens = _load(deployment.url, args)
        finally:
            peak_bytes = memory.stop()
    figures = {
        "ready_s": round(deployment.ready_s, 2),
        "pss_idle_bytes": idle_bytes,
        "pss_peak_bytes": peak_bytes,
        "ttft_median_s": round(statistics.median(first_tokens), 4),
        "exit_code": deployment.exit_code,
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)},
    }
    for name in ("ready_s", "ttft_median_s"):
        sys.stdout.write(f"{name:18} {figures[name]}\n")
    for name in ("pss_idle_bytes", "pss_peak_bytes"):
        sys.stdout.write(f"{name:18} {figures[name]} ({int(str(figures[name])) / 1e9:.2f} GB)\n")
    device = "cuda" if Machine.here().num_gpus else "cpu"
    path = write_result("up", figures, device=device, directory=args.result_dir)
    sys.stdout.write(f"{path}\n")
    return 0


class _MemoryWatch:
    """Sum of the proportional set sizes of a process and all below it, and its peak."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> int:
        """Bytes at this moment."""
        return sum(_pss_bytes(pid) for pid in [self._pid, *_descendants(self._pid)])

    def stop(self) -> int:
        """Bytes at the peak."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._peak = max(self._peak, self.now())


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _load(url: str, args: argparse.Namespace) -> list[float]:
    """Seconds to the first token of each chat."""
    model = args.model

    def chat(number: int) -> float:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": args.max_tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": f"({number}) {_QUESTION}"}],
        }
        request = urllib.request.Request(
            url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.monotonic()
        first = 0.0
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if not first and b'"content":"' in line and b'"content":""' not in line:
                    first = time.monotonic() - began
        return first

    chat(0)
    with ThreadPoolExecutor(args.concurrency) as pool:
        return list(pool.map(chat, range(1, args.num_requests + 1)))
