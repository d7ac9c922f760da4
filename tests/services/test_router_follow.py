"""Decode that loads what prefill has stored while prefill stores the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.services.fake_worker import DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import (
    ANSWER,
    running_router,
    tiny_directory,
    tiny_script,
    until,
)
from tests.services.test_router_failures import read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("follow"))


def workers(model: Path, num_decode: int = 1) -> tuple[FakeWorker, list[FakeWorker]]:
    """Prefill whose commit waits, and decode that follows."""
    script = tiny_script(model)
    prefill = FakeWorker("p1", PREFILL, script)
    prefill.stored.clear()
    decodes = [FakeWorker(f"d{i}", DECODE, script) for i in range(num_decode)]
    for decode in decodes:
        decode.follows = True
    return prefill, decodes


async def test_decode_is_asked_with_token_1_and_does_not_wait_for_the_commit(model: Path) -> None:
    prefill, [decode] = workers(model)
    async with running_router(model, [prefill, decode]) as router:
        text, ids, errors = await read_stream(router)
        assert (text, ids, errors) == (ANSWER, prefill.script, [])
        (asked,) = decode.submits
        (given,) = prefill.submits
        assert list(asked.output_token_ids) == prefill.script[:1]
        assert asked.handoff_in.pending
        assert not asked.handoff_in.objects
        assert asked.handoff_in.num_tokens == len(given.prompt_token_ids)
        assert asked.ticket.epoch == given.ticket.epoch
        assert asked.ticket.nonce != given.ticket.nonce
        assert asked.ticket.prefill_incarnation == given.ticket.prefill_incarnation


async def test_a_commit_that_is_short_begins_decode_anew_with_what_there_is(model: Path) -> None:
    prefill, [decode] = workers(model)
    prefill.num_stored = 1
    decode.pause_at = 1
    async with running_router(model, [prefill, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: decode.submits)
        prefill.stored.set()
        await until(lambda: len(decode.submits) == 2)
        decode.resume.set()
        text, ids, errors = await reading
        assert (text, ids, errors) == (ANSWER, prefill.script, [])
        first, second = decode.submits
        assert not second.handoff_in.pending
        assert second.handoff_in.num_tokens == 1
        assert second.ticket.epoch == first.ticket.epoch + 1
        await until(lambda: (first.ticket.request_id, first.ticket.epoch) in decode.cancels)
        assert len(prefill.submits) == 1


async def test_decode_that_refuses_to_follow_is_asked_again_with_the_commit(model: Path) -> None:
    prefill, [decode] = workers(model)
    decode.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    async with running_router(model, [prefill, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: decode.submits)
        decode.refuse = None
        prefill.stored.set()
        assert (await reading)[:2] == (ANSWER, prefill.script)
        first, second = decode.submits
        assert first.handoff_in.pending
        assert second.handoff_in.objects
        assert len(prefill.submits) == 1


async def test_a_prefill_that_dies_before_its_commit_is_replaced_and_its_follower_ends(
    model: Path,
) -> None:
    prefill, [decode] = workers(model)
    other = FakeWorker("p2", PREFILL, prefill.script)
    other.stored.clear()
    decode.pause_at = 1
    async with running_router(model, [prefill, other, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: decode.submits)
        first, second = sorted([prefill, other], key=lambda each: not each.submits)
        await first.die()
        await until(lambda: second.submits)
        ticket = decode.submits[0].ticket
        await until(lambda: (ticket.request_id, ticket.epoch) in decode.cancels)
        decode.resume.set()
        assert await reading == (ANSWER, prefill.script, [])
        assert [each.ticket.epoch for each in decode.submits][:2] == [1, 2]


async def test_a_follower_that_dies_is_replaced_by_one_that_loads_by_the_commit(
    model: Path,
) -> None:
    prefill, decodes = workers(model, num_decode=2)
    for decode in decodes:
        decode.pause_at = 1
    async with running_router(model, [prefill, *decodes]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: any(each.submits for each in decodes))
        prefill.stored.set()
        first, second = sorted(decodes, key=lambda each: not each.submits)
        second.resume.set()
        await until(lambda: len(prefill._frames) == 2)
        await first.die()
        assert (await reading)[:2] == (ANSWER, prefill.script)
        assert len(prefill.submits) <= 2
        assert not second.submits[0].handoff_in.pending or len(prefill.submits) == 2


async def test_a_client_that_leaves_ends_both(model: Path) -> None:
    prefill, [decode] = workers(model)
    decode.pause_at = 1
    async with running_router(model, [prefill, decode]) as router:
        reading = asyncio.create_task(read_stream(router))
        await until(lambda: decode.submits)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: prefill.cancels and decode.cancels)
        await until(lambda: not decode.running)
