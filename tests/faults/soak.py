"""Random faults on a busy system of four workers: what was done, answered, leaked.

    make soak ARGS="--seconds 60 --seed 1 --handoff direct"

Exits with 1 if an answer was wrong or something leaked, or if too little was done for that to mean
something: a slow machine gets twice the time for it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.clients import QUESTIONS, Answer, Question, ask, asking
from tests.faults.damage import spoil_files, spoil_pool
from tests.faults.deployment import Deployment, Shape, deployed

logger = logging.getLogger(__name__)

CLIENTS = 4
FAULT_EVERY_S = 1.2
# A kill costs seconds of start-up: one fault in so many.
KILL_SHARE = 0.12
# What ten minutes must at least have seen.
MIN_FAULTS_PER_S, MIN_COMPLETED_PER_S = 200 / 600, 2000 / 600


@dataclass(slots=True)
class Tally:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # cleanly, or with a killed router
    wrong: list[str] = field(default_factory=list)
    leaks: dict[str, object] = field(default_factory=dict)

    def is_enough(self, seconds: float) -> bool:
        """Whether as much was done as a run of so long is to do."""
        num_faults = self.faults.total()
        return (
            num_faults >= MIN_FAULTS_PER_S * seconds
            and self.completed >= MIN_COMPLETED_PER_S * seconds
        )


class Soak:
    """Clients that ask without end, and one who does harm."""

    def __init__(self, system: Deployment, seed: int) -> None:
        self.tally = Tally()
        self._system = system
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self, seconds: float) -> Tally:
        """Harm for so long, or longer where little was done, then look for what is left."""
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client, number) for number in range(CLIENTS)]
            try:
                while self._goes_on(time.monotonic() - began, seconds):
                    next_at = time.monotonic() + FAULT_EVERY_S
                    self._harm()
                    self._system.note_memory()
                    time.sleep(max(0.0, next_at - time.monotonic()))
            finally:
                self._stop.set()
                self._system.restore()
            for client in clients:
                client.result()
        try:
            self._system.check_nothing_leaks()
        except AssertionError as error:
            self.tally.leaks["counts"] = str(error)
        self.tally.leaks |= self._system.grown()
        return self.tally

    def _goes_on(self, passed_s: float, seconds: float) -> bool:
        enough = passed_s >= seconds and self.tally.is_enough(seconds)
        return not enough and passed_s < 2 * seconds

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            question, router = rng.choice(QUESTIONS), rng.randrange(2)
            answer = ask(self._system.ports[f"router-{router}"], question)
            expected = self._system.expected[question]
            with self._lock:
                if answer.is_right(expected):
                    self.tally.completed += 1
                elif answer.is_clean_error(expected) or (
                    answer.broken and expected.startswith(answer.text)
                ):
                    self.tally.failed[_reason(answer)] += 1
                else:
                    self.tally.wrong.append(f"{question}: {answer}")
            if not answer.ended:
                time.sleep(0.1)

    def _harm(self) -> None:
        kinds: list[Callable[[], str]] = [
            self._freeze,
            self._leave,
            self._flush,
            self._spoil_pool,
            self._spoil_files,
        ]
        kind = self._kill if self._random.random() < KILL_SHARE else self._random.choice(kinds)
        try:
            name = kind()
        except (OSError, AssertionError) as error:
            logger.warning("no %s: %s", kind.__name__, error)
            return
        self.tally.faults[name] += 1

    def _kill(self) -> str:
        victim = self._random.choice([*self._system.services, "redis"])
        if victim.startswith(("prefill", "decode")) and self._random.random() < 0.3:
            victim += "/engine"
        self.tally.leaks |= self._system.grown()
        try:
            self._system.send(victim, signal.SIGKILL)
        except subprocess.TimeoutExpired:
            self.tally.leaks[victim] = "its process did not end"
            self._system.send(victim.partition("/")[0], signal.SIGKILL)
        self._system.revive()
        return f"kill {victim}"

    def _freeze(self) -> str:
        victim = self._random.choice([*self._system.services, "redis"])
        self._system.send(victim, signal.SIGSTOP)
        time.sleep(self._random.choice([0.2, 0.5, 2.5]))
        self._system.send(victim, signal.SIGCONT)
        return f"freeze {victim}"

    def _leave(self) -> str:
        question = Question(QUESTIONS[2].prompt, max_tokens=200)
        port = self._system.ports[f"router-{self._random.randrange(2)}"]
        with contextlib.suppress(OSError, ValueError), asking(port, question) as response:
            for _ in range(self._random.randrange(20)):
                response.readline()
        return "client gone"

    def _flush(self) -> str:
        self._system.flush_redis()
        return "redis flushed"

    def _spoil_pool(self) -> str:
        spoil_pool(self._system.pid(self._random.choice([*self._system.of_role("kvstore")])))
        return "bits flipped in a pool"

    def _spoil_files(self) -> str:
        spoil_files(self._system.directory / "disk-0")
        return "files damaged"


def _reason(answer: Answer) -> str:
    """Without what differs from request to request."""
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f-]*", "N", answer.error or answer.broken)[:80]


def report(tally: Tally, seconds: float) -> str:
    """As a table."""
    lines = [f"{name:30} {count:6}" for name, count in sorted(tally.faults.items())]
    lines += [
        f"{'faults injected':30} {tally.faults.total():6}",
        f"{'requests completed':30} {tally.completed:6}",
        f"{'requests failed cleanly':30} {tally.failed.total():6}",
        f"{'wrong answers':30} {len(tally.wrong):6}",
        f"{'leaks':30} {len(tally.leaks):6}",
        f"{'seconds':30} {seconds:6.0f}",
    ]
    lines += [f"failed: {count:4} {why}" for why, count in tally.failed.most_common(8)]
    lines += [f"wrong: {each}" for each in tally.wrong[:5]]
    lines += [f"leak: {name}: {what}" for name, what in tally.leaks.items()]
    return "\n".join(lines)


def main() -> int:
    """Run and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--handoff", default="store", choices=("store", "direct", "auto"))
    args = parser.parse_args()
    shape = Shape(prefill=2, decode=2, stores=2, routers=2, handoff=args.handoff)
    # a run that is told to end takes its processes with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="diptych-soak-") as directory,
        deployed(Path(directory), shape) as system,
    ):
        tally = Soak(system, args.seed).run(args.seconds)
    sys.stdout.write(report(tally, time.monotonic() - began) + "\n")
    return 0 if tally.is_enough(args.seconds) and not (tally.wrong or tally.leaks) else 1


if __name__ == "__main__":
    sys.exit(main())
