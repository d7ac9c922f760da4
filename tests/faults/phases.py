"""The phases of a hand-off, by who is in them and the point it passes, and who may be hurt then."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


class Phase(NamedTuple):
    """`role` (that of a process) passes `point`."""

    role: str
    point: str

    def __str__(self) -> str:
        return f"{self.role}@{self.point}"


STORE_PHASES = (
    Phase("router-0", "router.submit"),
    Phase("prefill", "worker.admitted"),
    Phase("prefill", "engine.step"),
    Phase("prefill", "engine.outputs"),
    Phase("router-0", "router.continue"),
    Phase("prefill", "save.begin"),
    Phase("kvstore", "store.put_start"),
    Phase("prefill", "save.write"),
    Phase("kvstore", "store.put_end"),
    Phase("prefill", "save.end"),
    Phase("router-0", "router.hand_over"),
    Phase("router-0", "router.stored"),
    Phase("decode", "worker.admitted"),
    Phase("decode", "load.begin"),
    Phase("kvstore", "store.got"),
    Phase("decode", "load.read"),
    Phase("kvstore", "store.release"),
    Phase("decode", "load.end"),
    Phase("decode", "engine.outputs"),
    Phase("router-0", "router.taken_over"),
    Phase("router-0", "router.finished"),
)
VICTIMS = (
    "router-0",
    "prefill-0",
    "prefill-0/engine",
    "decode-0",
    "decode-0/engine",
    "kvstore-0",
    "redis",
)


DIRECT_PHASES = (
    Phase("router-0", "router.submit"),
    Phase("prefill", "worker.admitted"),
    Phase("decode", "worker.admitted"),
    Phase("prefill", "handoff.send_prefill_started"),
    Phase("decode", "handoff.got_prefill_started"),
    Phase("decode", "handoff.send_ack"),
    Phase("prefill", "engine.step"),
    Phase("prefill", "handoff.send_chunk"),
    Phase("decode", "handoff.got_chunk"),
    Phase("prefill", "handoff.send_commit"),
    Phase("router-0", "router.continue"),
    Phase("decode", "handoff.got_commit"),
    Phase("decode", "handoff.send_read_done"),
    Phase("prefill", "handoff.got_read_done"),
    Phase("prefill", "handoff.send_valid"),
    Phase("decode", "handoff.got_valid"),
    Phase("decode", "engine.outputs"),
    Phase("router-0", "router.finished"),
)


class Hurt(NamedTuple):
    """A victim gets a signal at a phase. `self` is the process that is in it,
    `source` the prefill worker that holds its KV."""

    phase: Phase
    victim: str
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.phase}-{self.victim.replace('/', '.')}-{self.number.name}"


# Who else is hurt in the default run: those that the phase waits for or has just spoken to.
_OTHERS = (
    Hurt(Phase("prefill", "save.write"), "kvstore-0", KILL),
    Hurt(Phase("prefill", "save.write"), "kvstore-0", STOP),
    Hurt(Phase("decode", "load.read"), "kvstore-0", KILL),
    Hurt(Phase("decode", "load.read"), "kvstore-0", STOP),
    Hurt(Phase("decode", "load.begin"), "prefill-0", KILL),
    Hurt(Phase("prefill", "save.begin"), "prefill-0/engine", KILL),
    Hurt(Phase("prefill", "engine.step"), "prefill-0/engine", STOP),
    Hurt(Phase("decode", "load.begin"), "self/engine", KILL),
    Hurt(Phase("decode", "engine.outputs"), "self/engine", STOP),
    Hurt(Phase("decode", "engine.outputs"), "router-0", STOP),
    Hurt(Phase("router-0", "router.continue"), "redis", KILL),
    Hurt(Phase("decode", "load.begin"), "redis", STOP),
)


_OTHERS_DIRECT = (
    Hurt(Phase("decode", "handoff.got_chunk"), "source", KILL),
    Hurt(Phase("decode", "handoff.got_commit"), "source", STOP),
    Hurt(Phase("decode", "handoff.got_commit"), "source/engine", STOP),
    Hurt(Phase("decode", "handoff.send_read_done"), "source", KILL),
)


def cases(direct: bool = False) -> list[Hurt]:
    """Each process at each of its own phases, and a few others; with DIPTYCH_EVERY_PHASE=1 every
    process at every phase."""
    phases = DIRECT_PHASES if direct else STORE_PHASES
    if os.environ.get("DIPTYCH_EVERY_PHASE") == "1":
        return [Hurt(p, v, n) for p in phases for v in VICTIMS for n in (KILL, STOP)]
    own = [Hurt(phase, "self", number) for phase in phases for number in (KILL, STOP)]
    return [*own, *(_OTHERS_DIRECT if direct else _OTHERS)]
