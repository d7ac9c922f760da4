"""Which worker, or pair of workers, is predicted to have token 2 first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diptych.clock import SystemClock
from diptych.services.router.paces import FIRST_S_PER_TOKEN, Paces
from diptych.services.router.picker import LeastTime, Option, PickRequest
from diptych.services.router.routable import Role
from diptych.services.router.route import Stage


@dataclass(frozen=True)
class Worker:
    key: str
    role: Role = Role.DECODE
    num_requests: int = 0
    num_tokens_in_flight: int = 0
    kv_usage: float = 0.0
    kv_bytes_per_token: int = 131_072
    links: dict[str, float] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return self.key

    def reads(self, incarnation: str) -> float | None:
        return self.links.get(incarnation)


def picks(options: list[Option], *, num_tokens: int = 1000, paces: Paces | None = None) -> set[str]:
    """The keys of what may be picked; random among near-equal options."""
    request = PickRequest("r", num_tokens, 0)
    picker = LeastTime(SystemClock(), paces or Paces())
    names: Counter[str] = Counter()
    for _ in range(40):
        option = picker.pick(options, request)
        names[option.worker.key + (option.partner.key if option.partner else "")] += 1
    return set(names)


def pairs(prefill: list[Worker], decode: list[Worker]) -> list[Option]:
    return [Option(p, Stage.PAIR, d) for p in prefill for d in decode]


P1, P2 = Worker("p1", Role.PREFILL), Worker("p2", Role.PREFILL)


def test_equal_pairs_are_taken_at_random() -> None:
    fast = {"p1": 10.0, "p2": 10.0}
    decode = [Worker("d1", links=fast), Worker("d2", links=fast)]
    assert picks(pairs([P1, P2], decode)) == {"p1d1", "p1d2", "p2d1", "p2d2"}


def test_the_pair_with_the_faster_link_is_taken() -> None:
    d1 = Worker("d1", links={"p1": 0.3, "p2": 20.0})
    d2 = Worker("d2", links={"p1": 20.0, "p2": 0.3})
    assert picks(pairs([P1, P2], [d1, d2])) == {"p1d2", "p2d1"}


def test_a_slow_link_is_better_than_a_long_queue_and_worse_than_a_short_one() -> None:
    decode = [Worker("d1", links={"p1": 10.0, "p2": 0.5})]
    for queued, expected in ((100, "p1d1"), (20_000, "p2d1")):
        busy = Worker("p1", Role.PREFILL, num_tokens_in_flight=queued)
        assert picks(pairs([busy, P2], decode)) == {expected}


def test_a_link_that_computing_hides_does_not_outweigh_load() -> None:
    """131 MB in 0.1 s of computing: at 10 and at 20 GB/s decode waits for the last chunk only."""
    busy = Worker("d1", num_requests=30, links={"p1": 20.0})
    idle = Worker("d2", links={"p1": 10.0})
    assert picks(pairs([P1], [busy, idle])) == {"p1d2"}


def test_a_full_cache_is_avoided() -> None:
    full = Worker("d1", kv_usage=0.95, links={"p1": 20.0})
    room = Worker("d2", num_requests=20, links={"p1": 20.0})
    assert picks(pairs([P1], [full, room])) == {"p1d2"}
    assert picks([Option(full, Stage.DECODE), Option(room, Stage.DECODE)]) == {"d2"}


def test_an_untested_link_is_worse_than_a_tested_one() -> None:
    d1, d2 = Worker("d1"), Worker("d2", links={"p1": 1.0})
    assert picks(pairs([P1], [d1, d2])) == {"p1d2"}


def test_a_worker_that_was_slow_gets_less_but_is_not_shut_out() -> None:
    paces = Paces()
    for _ in range(10):
        paces.token_1("p1", 1000, 1.0)
        paces.token_1("p2", 1000, 0.1)
    options = [Option(P1, Stage.PREFILL), Option(P2, Stage.PREFILL)]
    assert picks(options, paces=paces) == {"p2"}
    busy = Worker("p2", Role.PREFILL, num_tokens_in_flight=20_000)
    assert picks([options[0], Option(busy, Stage.PREFILL)], paces=paces) == {"p1"}
    paces.token_1("p1", 1000, 500.0)
    assert paces.s_per_token("p1") <= 2 * paces.s_per_token("p3")


def test_what_was_not_measured_takes_the_pace_of_all() -> None:
    paces = Paces()
    assert paces.s_per_token("p1") == FIRST_S_PER_TOKEN
    paces.token_1("p1", 1000, 2.0)
    assert paces.s_per_token("p2") == paces.s_per_token("p1") == 2e-3
    assert paces.store_s(100) is None
    paces.stored(1000, 2.0)
    assert paces.store_s(100) == 0.2
    for index in range(3000):
        paces.token_1(f"w{index}", 1, 1.0)
    assert len(paces._workers) == 1024


def test_among_hundreds_of_workers_the_best_pair_is_still_found() -> None:
    prefill = [
        Worker(f"p{i}", Role.PREFILL, num_tokens_in_flight=100 * (200 - i)) for i in range(200)
    ]
    links = {worker.key: 10.0 for worker in prefill}
    decode = [Worker(f"d{i}", num_requests=50 + i, links=links) for i in range(200)]
    decode[77] = Worker("d77", num_requests=1, links=links)
    assert picks(pairs(prefill, decode)) == {"p199d77"}
