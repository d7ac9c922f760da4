"""A router whose workers hand over directly: who is asked for what, and what follows losses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from diptych.proto import worker_pb2
from diptych.services.router.dispatch import DispatchTimes
from tests.services.fake_worker import DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    TIMES,
    Running,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)
from tests.services.test_router_failures import BODY, PATH, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("direct"))


@pytest.fixture
def script(model: Path) -> list[int]:
    return tiny_script(model)


def workers(script: list[int], role: int, count: int = 1) -> list[FakeWorker]:
    name = "p" if role == PREFILL else "d"
    made = [FakeWorker(f"{name}{i + 1}", role, script) for i in range(count)]
    for worker in made:
        worker.direct, worker.stores = True, False
    return made


async def asked_again(worker: FakeWorker) -> None:
    """Until the router knows the worker's state of now: when it asks anew, it has heard."""
    wanted = worker.num_asked + 3
    await until(lambda: worker.num_asked >= wanted)


def is_whole(submit: worker_pb2.SubmitRequest) -> bool:
    """Whether one worker alone is to do all that is left."""
    return not (
        submit.handoff_out or submit.HasField("handoff_in") or submit.HasField("handoff_peer")
    )


async def test_both_workers_are_asked_at_once_under_one_epoch(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        assert await read_stream(router) == (ANSWER, script, [])
        (asked,), (offered,) = prefill.submits, decode.submits
        assert asked.handoff_out
        assert asked.handoff_peer.incarnation == "d1-1"
        assert not offered.handoff_out
        assert offered.handoff_peer.incarnation == "p1-1"
        assert offered.handoff_peer.address == prefill.address
        for ticket in (asked.ticket, offered.ticket):
            assert (ticket.epoch, ticket.prefill_incarnation) == (1, "p1-1")
            assert ticket.decode_incarnation == "d1-1"
        assert asked.ticket.nonce != offered.ticket.nonce
        assert await router.metric('diptych:attempts_total{stage="pair"}') == 1
        assert await router.metric('diptych:handoffs_total{result="done",way="direct"}') == 1
        assert await router.metric('diptych:handoff_gap_seconds_count{way="direct"}') == 1
        assert await router.metric("diptych:stale_entries_total") <= 1


async def test_a_handoff_for_one_token_is_counted_though_prefill_has_not_confirmed_it(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.commits = False  # or it comes later than the end
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        body = {**BODY, "max_tokens": 2}
        assert (await read_stream(router, body))[1] == script[:2]
        assert await router.metric('diptych:handoffs_total{result="done",way="direct"}') == 1
        assert await router.metric('diptych:handoff_gap_seconds_count{way="direct"}') == 1


async def test_a_handoff_is_counted_once(model: Path, script: list[int]) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    decode.pause_at = 1
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router, {**BODY, "max_tokens": 2}))
        line = 'diptych:handoffs_total{result="done",way="direct"}'
        async with asyncio.timeout(60):
            while not await router.metric(line):  # by prefill's commit
                await asyncio.sleep(0.01)
        decode.resume.set()
        assert (await reading)[1] == script[:2]
        assert await router.metric(line) == 1


async def test_decode_may_be_ahead_of_token_1(model: Path, script: list[int]) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.pause_at = 0
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(decode._frames) == len(script) - 1)
        prefill.resume.set()
        assert await reading == (ANSWER, script, [])
        await until(lambda: prefill.cancels)  # its blocks need not wait for their lease to lapse
        assert not decode.cancels


async def test_a_prefill_that_dies_before_token_1_is_replaced(
    model: Path, script: list[int]
) -> None:
    prefills, (decode,) = workers(script, PREFILL, 2), workers(script, DECODE)
    for worker in prefills:
        worker.pause_at = 0
    async with running_router(model, [*prefills, decode], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: any(p.submits for p in prefills) and decode.submits)
        first, second = sorted(prefills, key=lambda p: not p.submits)
        second.resume.set()
        await first.die()
        assert await reading == (ANSWER, script, [])
        assert [submit.ticket.epoch for submit in decode.submits] == [1, 2]
        assert decode.submits[1].handoff_peer.worker_id == second.worker_id


async def test_a_prefill_that_left_its_kv_to_the_store_may_go_before_decode_has_room(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.leaves_to_store, decode.pause_at = True, 1
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(prefill._frames) == 2)
        await asked_again(decode)
        await prefill.die()
        await until(lambda: _has_no_prefill(router))
        await asyncio.sleep(2 * TIMES.resume_s)  # and is not expected back
        decode.resume.set()
        assert await reading == (ANSWER, script, [])
        assert len(decode.submits) == 1
        assert await router.metric('diptych:handoffs_total{result="done",way="direct"}') == 1


async def _has_no_prefill(router: Running) -> bool:
    return await router.metric('diptych:workers_ready{role="prefill"}') == 0


async def test_a_prefill_that_dies_after_token_1_leaves_the_rest_to_decode(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.commits = False
    decode.pause_at = 1
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        heard: list[int] = []
        reading = asyncio.create_task(read_stream(router, heard=heard))
        await until(lambda: heard and decode.submits)
        await prefill.die()
        await until(lambda: len(decode.submits) == 2)
        decode.resume.set()
        assert await reading == (ANSWER, script, [])
        assert is_whole(decode.submits[1])
        assert list(decode.submits[1].output_token_ids) == script[:1]


async def test_a_prefill_that_dies_after_token_1_is_replaced_where_there_is_another(
    model: Path, script: list[int]
) -> None:
    prefills, (decode,) = workers(script, PREFILL, 2), workers(script, DECODE)
    for worker in prefills:
        worker.commits = False
    decode.pause_at = 1
    async with running_router(model, [*prefills, decode], handoff="direct") as router:
        heard: list[int] = []
        reading = asyncio.create_task(read_stream(router, heard=heard))
        await until(lambda: heard and decode.submits)
        first, second = sorted(prefills, key=lambda p: not p.submits)
        await first.die()
        await until(lambda: len(decode.submits) == 2)
        decode.resume.set()
        assert await reading == (ANSWER, script, [])
        (again,) = second.submits
        assert again.handoff_out
        assert list(again.output_token_ids) == script[:1]


async def test_a_prefill_that_dies_once_decode_goes_on_is_not_missed(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.commits = False
    decode.pause_at = 4
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: prefill.cancels)  # let go at decode's first token
        await prefill.die()
        await asyncio.sleep(0.5)
        decode.resume.set()
        assert await reading == (ANSWER, script, [])
        assert len(decode.submits) == 1


async def test_a_decode_that_dies_mid_stream_is_replaced_without_loss(
    model: Path, script: list[int]
) -> None:
    (prefill,), decodes = workers(script, PREFILL), workers(script, DECODE, 2)
    for worker in decodes:
        worker.pause_at = 6
    async with running_router(model, [prefill, *decodes], handoff="direct") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: any(d.submits for d in decodes))
        first, second = sorted(decodes, key=lambda d: not d.submits)
        second.resume.set()
        await until(lambda: len(first._frames) == 5)
        await first.die()
        assert await reading == (ANSWER, script, [])
        (again,) = second.submits
        assert again.handoff_peer.incarnation == "p1-1"
        sent = list(again.output_token_ids)
        assert sent == script[: len(sent)]


async def test_a_read_that_fails_goes_to_another_prefill_then_to_decode_alone(
    model: Path, script: list[int]
) -> None:
    prefills, (decode,) = workers(script, PREFILL, 2), workers(script, DECODE)
    for prefill in prefills:
        prefill.pause_at = 0
    decode.handoff_failure = "the lease lapsed"
    async with running_router(model, [*prefills, decode], handoff="direct") as router:
        assert await read_stream(router) == (ANSWER, script, [])
        assert [len(prefill.submits) for prefill in prefills] == [1, 1]
        assert [is_whole(submit) for submit in decode.submits] == [False, False, True]
        await until(lambda: all(len(prefill.cancels) == 1 for prefill in prefills))
        assert await router.metric('diptych:attempts_failed_total{stage="pair"}') == 2
        assert await router.metric('diptych:handoffs_total{result="failed",way="direct"}') == 2


async def test_a_read_that_fails_goes_through_the_store_where_there_is_one(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.stores = decode.stores = True
    decode.reads = [prefill]
    decode.handoff_failure = "the lease lapsed"
    prefill.pause_at = 0
    async with running_router(model, [prefill, decode], handoff="auto") as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(prefill.submits) == 2)
        prefill.resume.set()
        assert await reading == (ANSWER, script, [])
        assert prefill.submits[0].HasField("handoff_peer")
        assert not prefill.submits[1].HasField("handoff_peer")
        assert decode.submits[-1].HasField("handoff_in")
        assert await router.metric('diptych:handoffs_total{result="failed",way="direct"}') == 1
        assert await router.metric('diptych:handoffs_total{result="done",way="store"}') == 1
        assert await router.metric('diptych:handoff_gap_seconds_count{way="store"}') == 1


async def test_a_hand_off_that_never_comes_is_not_waited_for(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.commits = False
    decode.pause_at = 1
    times = DispatchTimes(handoff_s=0.2)
    running = running_router(model, [prefill, decode], dispatch_times=times, handoff="direct")
    async with running as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: len(decode.submits) == 2)
        decode.resume.set()
        assert await reading == (ANSWER, script, [])
        await until(lambda: prefill.cancels)
        assert is_whole(decode.submits[1])


async def test_token_1_may_be_the_end(model: Path, script: list[int]) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    decode.pause_at = 1
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        body = {**BODY, "max_tokens": 1}
        _, ids, errors = await read_stream(router, body)
        assert (ids, errors) == (script[:1], [])
        await until(lambda: decode.cancels and not decode.running)


async def test_a_client_that_leaves_ends_both(model: Path, script: list[int]) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.pause_at, decode.pause_at = 0, 1
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        asking = asyncio.create_task(router.session.post(f"{router.url}{PATH}", json=BODY))
        await until(lambda: prefill.running and decode.running)
        asking.cancel()
        await until(lambda: not prefill.running and not decode.running)
        assert prefill.cancels == decode.cancels != []


@pytest.mark.parametrize("refuses", [PREFILL, DECODE])
async def test_a_pair_of_which_one_refuses_is_given_up_by_the_other(
    model: Path, script: list[int], refuses: int
) -> None:
    prefills, decodes = workers(script, PREFILL, 2), workers(script, DECODE, 2)
    refusing = (prefills if refuses == PREFILL else decodes)[0]
    refusing.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with running_router(model, [*prefills, *decodes], handoff="direct") as router:
        for _ in range(8):
            assert await read_stream(router) == (ANSWER, script, [])
        every = [submit for worker in (*prefills, *decodes) for submit in worker.submits]
        assert refusing.submits
        assert not [submit for submit in every if is_whole(submit)]


async def test_auto_goes_through_the_store_until_a_link_is_tested(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    prefill.stores = decode.stores = True
    async with running_router(model, [prefill, decode], handoff="auto") as router:
        await until(lambda: decode.peers == ["p1-1"])
        assert await read_stream(router) == (ANSWER, script, [])
        assert decode.submits[0].HasField("handoff_in")
        assert await router.metric('diptych:handoffs_declined_total{reason="no link"}') == 1
        decode.reads = [prefill]
        await asked_again(decode)
        assert await read_stream(router) == (ANSWER, script, [])
        assert decode.submits[1].handoff_peer.incarnation == "p1-1"


async def test_a_decode_worker_is_told_of_prefill_workers_that_come_and_restart(
    model: Path, script: list[int]
) -> None:
    prefills, (decode,) = workers(script, PREFILL, 2), workers(script, DECODE)
    async with running_router(model, [*prefills, decode], handoff="auto"):
        await until(lambda: sorted(decode.peers) == ["p1-1", "p2-1"])
        await prefills[0].restart()
        await until(lambda: sorted(decode.peers) == ["p1-2", "p2-1"])
        await decode.break_streams()
        decode.peers = []
        await until(lambda: sorted(decode.peers) == ["p1-2", "p2-1"])


async def test_a_decode_worker_without_a_link_is_told_again(model: Path, script: list[int]) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    async with running_router(model, [prefill, decode], handoff="auto"):
        for _ in range(2):
            await until(lambda: decode.peers == ["p1-1"])
            decode.peers = []
        decode.reads = [prefill]
        await asked_again(decode)
        decode.peers = []
        await asked_again(decode)
        assert decode.peers == []


@pytest.mark.parametrize(("handed", "stores"), [("handoff_in", True), (None, False)])
async def test_direct_over_workers_that_are_not_uses_their_store_or_decode_alone_and_says_so(
    model: Path,
    script: list[int],
    caplog: pytest.LogCaptureFixture,
    handed: str | None,
    stores: bool,
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    for worker in (prefill, decode):
        worker.direct, worker.stores = False, stores
    async with running_router(model, [prefill, decode], handoff="direct") as router:
        for _ in range(3):
            assert await read_stream(router) == (ANSWER, script, [])
        declined = 'diptych:handoffs_declined_total{reason="prefill not direct"}'
        assert await router.metric(declined) == 3
    assert sum("KV does not go directly from p1" in text for text in caplog.messages) == 1
    for submit in decode.submits:
        assert submit.HasField(handed) if handed else is_whole(submit)


@pytest.mark.parametrize("failure", ["", "no transport is common to both sides"])
async def test_a_router_is_ready_once_the_first_links_are_tested_whatever_the_result(
    model: Path, script: list[int], failure: str
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    patient = replace(TIMES, link_test_s=600.0)
    async with running_router(
        model, [prefill, decode], handoff="auto", link_times=patient
    ) as router:
        await until(lambda: decode.peers == ["p1-1"])
        assert await ready(router) == (503, "links between workers are being tested")
        decode.reads, decode.failure = [prefill], failure
        await until(lambda: is_ready(router))
        assert await read_stream(router) == (ANSWER, script, [])
        paired = bool(prefill.submits) and prefill.submits[0].HasField("handoff_peer")
        assert paired is (not failure)
        # who comes later is not waited for
        await prefill.restart()
        await until(lambda: decode.peers == ["p1-2"])
        await until(lambda: is_ready(router))


async def test_tests_that_never_end_do_not_keep_a_router_from_being_ready(
    model: Path, script: list[int]
) -> None:
    (prefill,), (decode,) = workers(script, PREFILL), workers(script, DECODE)
    async with running_router(
        model, [prefill, decode], handoff="direct", link_times=replace(TIMES, link_test_s=0.5)
    ) as router:
        await until(lambda: is_ready(router))


async def ready(router: Running) -> tuple[int, str]:
    async with router.session.get(f"{router.admin}/readyz") as answer:
        return answer.status, (await answer.text()).strip()


async def is_ready(router: Running) -> bool:
    return (await ready(router))[0] == 200
