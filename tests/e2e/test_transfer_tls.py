"""KV between workers with certificates: it goes where both are of one authority, nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificates
from tests.e2e.answers import prompt
from tests.e2e.cluster import Api, ServiceProcess, cluster, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FIELDS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass
class System:
    """A prefill worker; a decode worker of its authority and one of another's, each behind a router
    of its own."""

    prefill: ServiceProcess
    ours: ServiceProcess
    others: ServiceProcess
    router: ServiceProcess
    api: Api
    other_router: ServiceProcess
    other_api: Api


def files(folder: Path) -> dict[str, Any]:
    """Settings of a worker with the certificates of a folder."""
    if not (folder / "key.pem").exists():
        folder.mkdir()
        make_certificates(folder)
    names = ("certificate", "key", "authority")
    return {f"kv_tls_{name}": str(folder / f"{name}.pem") for name in names}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("tls")
    ours, others = files(directory / "ours"), files(directory / "others")
    with cluster(make_tiny_model(directory / "model"), directory) as made:
        direct = {"handoff": "direct", "kv_transports": "tcp"}
        prefill, p = made.worker("prefill", worker={**direct, **ours})
        decode, d1 = made.worker("decode", worker={**direct, **ours})
        stranger, d2 = made.worker("decode", worker={**direct, **others})
        router, api = made.router(p, d1, handoff="auto")
        other_router, other_api = made.router(p, d2, handoff="auto")
        made.wait_ready()
        yield System(prefill, decode, stranger, router, api, other_router, other_api)


def test_kv_goes_through_tls_and_what_a_stranger_may_not_read_it_computes(system: System) -> None:
    ids = prompt(150, salt=1)
    answers = [api.complete(ids, **FIELDS) for api in (system.api, system.other_api)]
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    assert system.router.metric("diptych:handoffs_total", way="direct", result="done") == 1
    received = "diptych:handoffs_received_total"
    until(lambda: system.ours.metric(received, result="valid") == 1, "decode says so")
    assert system.ours.metric("diptych:handoff_link_bytes_per_second", transport="tcp") > 0
    assert system.ours.prompt_tokens("local_compute") == 0
    declined = "diptych:handoffs_declined_total"
    assert system.other_router.metric(declined, reason="no link") == 1
    assert system.others.metric(received, result="valid") == 0
    assert system.others.prompt_tokens("local_compute") == 150
    assert "cannot be read" in system.others.log.read_text()
