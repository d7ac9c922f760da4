"""One hand-off as the exploration sees it, and the names of what must always hold."""

from __future__ import annotations

from typing import NamedTuple

from diptych.connectors.handoff import DECODE_ENDS, PREFILL_ENDS, State
from diptych.connectors.handoff_machines import Decode, Prefill, Router, Shape

VALID_KV = "no decode on KV that is not valid"
DMA_TARGET = "no block both free and a DMA target"
LEAK = "no leak after quiescence"
ONE_END = "exactly one end"
ENDS = "every hand-off ends"
POSITIONS = "every position once and in order"
NEVER_WAITS = "prefill never waits"

# one prefix hit and one block computed here; two chunks; three tokens; one retry
SHAPE = Shape(chunks=(0, 0b01, 0b11), hits=0b01, num_tokens=3, max_epoch=2)


class World(NamedTuple):
    """Machines, messages under way (a bit each), and what no machine knows.

    `good` are prefill's blocks with the right content, `bad` decode's with the wrong one, `ghosts`
    reads that decode has given up and that still write.
    """

    router: Router
    prefill: Prefill
    decode: Decode
    network: int
    good: int
    bad: int
    ghosts: int
    faults_left: int


class Edge(NamedTuple):
    """What happens, whether it is bad luck, and the world after."""

    label: str
    is_fault: bool
    world: World


class Violation(Exception):
    """A named invariant does not hold after an edge."""

    def __init__(self, invariant: str, label: str) -> None:
        super().__init__(invariant)
        self.invariant = invariant
        self.label = label


def is_over(world: World) -> bool:
    """All three have ended and nothing is held."""
    return (
        world.router.state is State.CLOSED
        and world.decode.state in DECODE_ENDS
        and not world.decode.held
        and not world.ghosts
        and world.prefill.state in PREFILL_ENDS
        and not world.prefill.leased
    )
