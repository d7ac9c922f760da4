"""Everything that can happen to one hand-off, breadth first: loss, repetition and reordering of
messages, restarts, deadlines, lapsing leases, and blocks that are overwritten as soon as nobody
holds them. `explore_moves` says what can happen; here is the search.

    python -m diptych.connectors.explore [--faults N]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

from diptych.connectors.explore_moves import Moves
from diptych.connectors.explore_world import (
    ENDS,
    LEAK,
    SHAPE,
    Violation,
    World,
    is_over,
)
from diptych.connectors.handoff import RULES, Rules, State
from diptych.connectors.handoff_machines import Shape


@dataclass(slots=True)
class Report:
    """What a search has found; `violated` None means nothing wrong."""

    num_states: int = 0
    num_edges: int = 0
    violated: str | None = None
    trace: list[str] = field(default_factory=list)


class Explorer:
    """Searches one set of rules."""

    def __init__(self, rules: Rules = RULES, shape: Shape = SHAPE, faults: int = 2) -> None:
        self._moves = Moves(rules, shape)
        self._faults = faults
        self._worlds: list[World] = []
        self._origins: list[tuple[int, str]] = []
        self._before: list[list[int]] = []  # by which moves without bad luck one gets to a world

    def run(self) -> Report:
        """Visit every world; stop at the first edge that breaks an invariant."""
        report = Report()
        try:
            report.num_edges = self._search()
        except _Found as found:
            report.violated = found.violation.invariant
            report.trace = [*self._trace(found.at), found.violation.label]
        else:
            self._check_ends(report)
        report.num_states = len(self._worlds)
        return report

    def _search(self) -> int:
        index: dict[tuple[int, ...], int] = {}
        self._visit(index, self._moves.start(self._faults), -1, "the router issues tickets")
        num_edges = 0
        for at, world in enumerate(self._worlds):  # grows while it is read
            try:
                for edge in self._moves.edges(world):
                    num_edges += 1
                    to = self._visit(index, edge.world, at, edge.label)
                    if not edge.is_fault:
                        self._before[to].append(at)
            except Violation as violation:
                raise _Found(violation, at) from None
        return num_edges

    def _visit(
        self, index: dict[tuple[int, ...], int], world: World, origin: int, label: str
    ) -> int:
        number = index.setdefault(self._moves.key(world), len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append(world)
            self._origins.append((origin, label))
            self._before.append([])
        return number

    def _check_ends(self, report: Report) -> None:
        """From every world, moves without bad luck must lead to an end that holds nothing."""
        todo = [at for at, world in enumerate(self._worlds) if is_over(world)]
        ending = bytearray(len(self._worlds))
        for at in todo:
            ending[at] = 1
        while todo:
            for before in self._before[todo.pop()]:
                if not ending[before]:
                    ending[before] = 1
                    todo.append(before)
        stuck = [at for at, ends in enumerate(ending) if not ends]
        leaking = next((at for at in stuck if _leaks(self._worlds[at])), None)
        if stuck:
            report.violated = ENDS if leaking is None else LEAK
            report.trace = self._trace(stuck[0] if leaking is None else leaking)

    def _trace(self, at: int) -> list[str]:
        labels = []
        while at >= 0:
            at, label = self._origins[at]
            labels.append(label)
        return labels[::-1]


class _Found(Exception):
    """A violation and the world before it."""

    def __init__(self, violation: Violation, at: int) -> None:
        super().__init__(str(violation))
        self.violation = violation
        self.at = at


def _leaks(world: World) -> bool:
    """The client's request is over, and blocks are still held for it."""
    over = world.router.state in (State.ENDED, State.CLOSED)
    return over and (world.decode.held or world.ghosts > 0 or world.prefill.leased > 0)


def main(arguments: list[str] | None = None) -> int:
    """Explore the rules and say what was seen; 1 if an invariant does not hold."""
    parser = argparse.ArgumentParser(description="explore the hand-off's rules")
    parser.add_argument("--faults", type=int, default=2, help="most faults in one run")
    faults = parser.parse_args(arguments).faults
    started = time.monotonic()
    report = Explorer(faults=faults).run()
    seconds = time.monotonic() - started
    out = sys.stdout.write
    out(
        f"visited {report.num_states} states over {report.num_edges} transitions, "
        f"at most {faults} faults, in {seconds:.1f} s\n"
    )
    if report.violated is None:
        out("all invariants hold\n")
        return 0
    out(f"violated: {report.violated}\n")
    out("".join(f"  {step}\n" for step in report.trace))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
