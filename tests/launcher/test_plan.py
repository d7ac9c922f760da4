"""How one machine is shared out."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.config_sources import SECTIONS, load
from diptych.launcher.plan import Machine, kvstore_spec, router_spec, worker_spec
from diptych.launcher.up import places


def worker(machine: Machine, **changes: Any) -> Any:
    settings = load(tuple(SECTIONS), changes.pop("flags", {}), {})
    values: dict[str, Any] = {
        "role": "decode",
        "index": 1,
        "gpu": 3,
        "num_engines": 2,
        "ports": (7001, 7002),
        "redis": "redis://x",
        "ticket_keys": "/keys",
    }
    return worker_spec(settings, machine, **{**values, **changes})


@pytest.mark.parametrize(("cores", "engines", "threads"), [(2, 2, 1), (8, 2, 4), (1, 4, 1)])
def test_engines_share_the_cores(cores: int, engines: int, threads: int) -> None:
    spec = worker(Machine(cores, 0), num_engines=engines)

    assert spec.sections["engine"]["num_threads"] == threads
    assert spec.environment == {"OMP_NUM_THREADS": str(threads)}


def test_each_worker_gets_a_gpu_and_sharers_divide_its_memory() -> None:
    spec = worker(Machine(32, 2), num_engines=4)

    assert spec.environment == {"CUDA_VISIBLE_DEVICES": "1"}
    assert spec.sections["engine"]["gpu_memory_utilization"] == pytest.approx(0.45)


def test_a_cpu_engine_on_a_gpu_machine_takes_no_gpu() -> None:
    spec = worker(Machine(32, 2), flags={"engine.device": "cpu"})

    assert "CUDA_VISIBLE_DEVICES" not in spec.environment


def test_workers_hand_over_as_the_router_is_told_to() -> None:
    spec = worker(Machine(2, 0), flags={"router.handoff": "direct"})

    assert spec.sections["worker"]["handoff"] == "direct"


def test_what_a_spec_holds_is_a_configuration_that_loads() -> None:
    settings = load(tuple(SECTIONS), {}, {})
    router = router_spec(
        settings,
        ports=(8, 9),
        redis=None,
        ticket_keys="/keys",
        workers=["a:1"],
        supervisor="/sock",
    )

    for spec in (worker(Machine(2, 0)), router):
        for section, values in spec.sections.items():
            load((section,), {f"{section}.{k}": v for k, v in values.items()}, {})
    assert router.sections["router"]["workers"] == ["a:1"]


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("10.1.2.3", "10.1.2.3"),
    ],
)
def test_the_router_is_asked_where_it_listens(host: str, reached: str) -> None:
    settings = load(tuple(SECTIONS), {"router.host": host}, {})
    spec = router_spec(
        settings, ports=(8, 9), redis=None, ticket_keys="/k", workers=["a:1"], supervisor="/s"
    )

    assert spec.host == reached


def test_what_up_prints_when_ready_names_every_process() -> None:
    settings = load(tuple(SECTIONS), {"redis.registry_prefix": "mine"}, {})
    store = kvstore_spec(settings, ports=(5, 6, 7), redis="redis://x")
    specs = [store, worker(Machine(2, 0))]

    lines = places(specs, "redis://:secret@x:6379", "mine")

    assert lines == [
        "kvstore    gRPC 127.0.0.1:5     http://127.0.0.1:7/metrics",
        "decode-1   gRPC 127.0.0.1:7001  http://127.0.0.1:7002/metrics",
        "directory  redis://x:6379",
        "diptych store stats --redis redis://x:6379 --registry-prefix mine",
    ]


def test_without_a_directory_there_is_none_to_print() -> None:
    settings = load(tuple(SECTIONS), {"router.host": "0.0.0.0"}, {})
    router = router_spec(
        settings, ports=(8, 9), redis=None, ticket_keys="/k", workers=["a:1"], supervisor="/s"
    )

    assert places([router], None, "diptych") == [
        "router     gRPC 127.0.0.1:8  http://127.0.0.1:9/metrics"
    ]
