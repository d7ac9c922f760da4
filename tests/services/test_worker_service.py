"""The Worker service over real gRPC with an engine that computes nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from diptych import errors
from diptych.connectors.tickets import TicketKeys
from diptych.engine.request import FinishReason, KVCommit, KVObject
from diptych.proto import common_pb2, worker_pb2
from diptych.rpc import error_from_rpc, open_channel
from diptych.wire import commit_to_proto
from diptych.worker import servicer, streams
from diptych.worker.stream_state import PairState
from tests.services.worker_fakes import FakeRouter, SteppedClock, router_of, serve, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


async def error_of(call: Any) -> errors.DiptychError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_outputs_of_a_request_come_on_its_routers_stream() -> None:
    async with serve() as worker, router_of(worker) as router, router_of(worker, "r2") as other:
        await router.submit("a")
        worker.engine.emit("a#1", 0, [7])
        first = await router.read()
        worker.engine.emit("a#1", 1, [8], FinishReason.STOP)
        second = await router.read()
        assert (first.sequence, first.incarnation, list(first.token_ids)) == (1, "w1", [7])
        assert (second.sequence, list(second.finish_reasons)) == (2, [FinishReason.STOP])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.call.read(), 0.1)


async def test_a_submit_reaches_the_engine_as_it_was_meant() -> None:
    commit = KVCommit(
        epoch=2,
        kv_namespace="ab",
        num_tokens=3,
        objects=[KVObject(key=b"k" * 32, start_token=0, end_token=3, checksum=1, num_bytes=9)],
        connector="StoreConnector",
    )
    async with serve() as worker, router_of(worker) as router:
        await router.submit(
            "a",
            2,
            output_token_ids=[9],
            eos_token_ids=[0],
            priority=-3,
            cache_salt="salt",
            tenant="alice",
            handoff_in=commit_to_proto(commit),
        )
        await router.submit("b", handoff_out=True)
        a, b = worker.engine.requests["a#2"], worker.engine.requests["b#1"]
    assert (a.prompt_token_ids, a.output_token_ids, a.eos_token_ids) == ([1, 2, 3], [9], [0])
    assert (a.priority, a.cache_salt, a.sampling_params.max_tokens) == (-3, "salt", 8)
    assert (a.tenant, b.tenant) == ("alice", "")
    assert a.kv_transfer_params is not None
    assert a.kv_transfer_params.commit == commit
    assert b.kv_transfer_params is not None
    assert b.kv_transfer_params.do_remote_decode


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("an empty prompt", {"prompt_token_ids": []}, "prompt is empty"),
    ("a token outside the vocabulary", {"prompt_token_ids": [100]}, "outside the vocabulary"),
    ("an output token outside it", {"output_token_ids": [100]}, "outside the vocabulary"),
    ("an end token outside it", {"eos_token_ids": [100]}, "eos_token_ids"),
    ("a prompt over the context", {"prompt_token_ids": [1] * 64}, "context holds 64"),
    ("no seed", {"sampling": common_pb2.SamplingParams(max_tokens=1)}, "seed"),
    (
        "a bad parameter",
        {"sampling": common_pb2.SamplingParams(seed=1, max_tokens=1, top_p=2.0)},
        "top_p",
    ),
    (
        "nothing left to sample",
        {
            "output_token_ids": [1],
            "sampling": common_pb2.SamplingParams(seed=1, max_tokens=1),
        },
        "no output token",
    ),
    (
        "both sides of a hand-off",
        {"handoff_out": True, "handoff_in": worker_pb2.KvCommit()},
        "not both",
    ),
    ("a commit with a gap", {"handoff_in": worker_pb2.KvCommit(num_tokens=3)}, "objects"),
    ("a long salt", {"cache_salt": "x" * 1025}, "cache_salt"),
]


@pytest.mark.parametrize(
    ("fields", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
async def test_what_can_never_run_is_invalid(fields: dict[str, Any], message: str) -> None:
    async with serve() as worker, router_of(worker) as router:
        caught = await error_of(router.submit("a", **fields))
        assert isinstance(caught, errors.InvalidRequestError)
        assert not worker.engine.requests
        assert re.search(message, caught.message)


def _other_incarnation(ticket: worker_pb2.Ticket) -> None:
    ticket.decode_incarnation = "w0"


def _other_epoch(ticket: worker_pb2.Ticket) -> None:
    ticket.epoch += 1  # after it was signed


@pytest.mark.parametrize("spoil", [_other_incarnation, _other_epoch])
async def test_a_bad_ticket_is_a_failed_precondition(
    spoil: Callable[[worker_pb2.Ticket], None],
) -> None:
    keys = TicketKeys.drawn()
    async with serve(keys=keys) as worker, router_of(worker, keys=keys) as router:
        request = router.request("a")
        spoil(request.ticket)
        caught = await error_of(router.stub.Submit(request, timeout=60))
        assert isinstance(caught, errors.StaleTicketError)
        assert caught.grpc_status == "FAILED_PRECONDITION"
        assert not worker.engine.requests


async def test_a_repeated_ticket_is_told_that_it_was_accepted() -> None:
    async with serve() as worker, router_of(worker) as router:
        request = router.request("a")
        await router.stub.Submit(request, timeout=60)
        caught = await error_of(router.stub.Submit(request, timeout=60))
        assert isinstance(caught, errors.DuplicateRequestError)
        assert list(worker.engine.requests) == ["a#1"]


async def test_a_router_without_a_stream_cannot_submit() -> None:
    async with serve() as worker, open_channel(worker.address) as channel:
        caught = await error_of(FakeRouter(channel).submit("a"))
        assert isinstance(caught, errors.NoStreamError)


async def test_a_full_queue_refuses() -> None:
    async with serve(max_queued=2) as worker, router_of(worker) as router:
        await router.submit("a")
        await router.submit("b")
        assert isinstance(await error_of(router.submit("c")), errors.CapacityError)
        await router.cancel(("a", 1))
        await until(lambda: worker.engine.aborted == ["a#1"])
        await router.submit("d")


async def test_a_cancel_aborts_in_the_engine_and_an_unknown_one_is_counted() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a", 2)
        await router.cancel(("a", 1), ("ghost", 1))
        await router.cancel(("a", 2))
        await until(lambda: worker.engine.aborted == ["a#2"])
        assert not worker.engine.requests
        assert worker.metrics.unknown_cancels._value.get() == 2
        worker.engine.emit("a#2", 0, [7])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.call.read(), 0.1)


async def test_a_higher_epoch_replaces_the_older_attempt() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a", 1)
        await router.submit("a", 2, output_token_ids=[5])
        await until(lambda: worker.engine.aborted == ["a#1"])
        worker.engine.emit("a#1", 0, [7])
        worker.engine.emit("a#2", 1, [8])
        frame = await router.read()
        assert (list(frame.epochs), list(frame.token_ids)) == ([2], [8])
        assert isinstance(await error_of(router.submit("a", 1)), errors.StaleTicketError)


async def test_a_request_that_waits_past_its_tickets_time_ends_with_an_error() -> None:
    clock = SteppedClock()
    async with serve(clock=clock) as worker, router_of(worker) as router:
        await router.submit("a", ttl_ms=600_000)
        await router.submit("b", ttl_ms=600_000)
        await router.submit("c", ttl_ms=3_600_000)
        worker.engine.emit("b#1", 0, [7])
        assert list((await router.read()).request_ids) == ["b"]
        clock.ahead_s = 601.0
        frame = await router.read()
        assert list(frame.request_ids) == ["a"]
        assert list(frame.finish_reasons) == [FinishReason.ERROR]
        assert "ticket" in frame.extras[0].error
        assert worker.engine.aborted == ["a#1"]


async def test_a_stream_that_breaks_resumes_with_what_was_missed() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a")
        worker.engine.emit("a#1", 0, [7])
        await router.read()
        router.call.cancel()
        (pair,) = worker.servicer._hub._pairs.values()
        await until(lambda: pair.state.state is PairState.DETACHED)
        worker.engine.emit("a#1", 1, [8])
        worker.engine.emit("a#1", 2, [9])
        await until(lambda: pair.state._num_pending == 2)
        answer = await router.open()
        assert (answer.sequence, answer.gap) == (1, False)
        frame = await router.read()
        assert (frame.sequence, list(frame.token_ids)) == (2, [8, 9])
        assert not worker.engine.aborted


async def test_requests_of_a_gone_router_are_aborted_after_its_grace() -> None:
    async with serve(grace_s=0.5) as worker, router_of(worker) as router:
        await router.submit("a")
        router.call.cancel()
        began = time.monotonic()
        await until(lambda: worker.engine.aborted == ["a#1"])
        assert time.monotonic() - began >= 0.4, "it had time to come back"
        assert (await router.open()).gap
        await router.submit("a", 2)


async def test_a_gap_aborts_what_the_router_can_no_longer_follow() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a")
        router.incarnation = "w0"
        assert (await router.open()).gap
        await until(lambda: worker.engine.aborted == ["a#1"])


async def test_a_second_stream_ends_the_first() -> None:
    async with serve() as worker, router_of(worker) as router:
        first = router.call
        await router.open()
        caught = await error_of(asyncio.wait_for(first.read(), 60))
        assert isinstance(caught, errors.UnavailableError)
        await router.submit("a")
        worker.engine.emit("a#1", 0, [7])
        assert list((await router.read()).token_ids) == [7]


async def test_a_router_that_never_acknowledges_is_dropped() -> None:
    async with serve(max_frames=2) as worker, router_of(worker) as router:
        await router.submit("a")
        for position in range(8):
            worker.engine.emit("a#1", position, [7])
        await until(lambda: worker.engine.aborted == ["a#1"])


@pytest.mark.parametrize(
    "hello",
    [
        worker_pb2.RouterMessage(ack=worker_pb2.Ack()),
        worker_pb2.RouterMessage(hello=worker_pb2.Hello(protocol_version=1)),
        worker_pb2.RouterMessage(
            hello=worker_pb2.Hello(router_incarnation="r", protocol_version=9)
        ),
    ],
    ids=["no hello", "no incarnation", "a far version"],
)
async def test_a_stream_must_begin_with_a_good_hello(hello: worker_pb2.RouterMessage) -> None:
    async with serve() as worker, open_channel(worker.address) as channel:
        call = FakeRouter(channel).stub.Stream()
        await call.write(hello)
        assert isinstance(await error_of(call.read()), errors.InvalidRequestError)


async def test_a_stream_without_a_hello_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HELLO_S", 0.1)
    async with serve() as worker, open_channel(worker.address) as channel:
        began = time.monotonic()
        call = FakeRouter(channel).stub.Stream(timeout=60)
        assert isinstance(await error_of(call.read()), errors.DeadlineError)
        assert time.monotonic() - began < 30


async def test_streams_of_more_routers_than_there_can_be_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_ROUTERS", 2)
    async with (
        serve(grace_s=0.1) as worker,
        router_of(worker, "r1") as first,
        open_channel(worker.address) as channel,
    ):
        async with router_of(worker, "r2"):
            third = FakeRouter(channel, "r3")
            call = third.stub.Stream()
            hello = worker_pb2.Hello(router_incarnation="r3", protocol_version=1)
            await call.write(worker_pb2.RouterMessage(hello=hello))
            assert isinstance(await error_of(call.read()), errors.CapacityError)
            await first.open()  # one that is known may open another
        await until(lambda: "r2" not in worker.servicer._hub)
        await third.open()


async def test_a_drain_admits_no_more_and_waits_for_what_runs() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a")
        drain = asyncio.create_task(_drain(router, 60_000))
        await until(lambda: worker.servicer.draining)
        assert isinstance(await error_of(router.submit("b")), errors.DrainingError)
        assert (await router.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)).draining
        assert not drain.done()
        worker.engine.emit("a#1", 0, [7], FinishReason.LENGTH)
        await router.read()
        assert await asyncio.wait_for(drain, 60) == 0


async def test_a_drain_reports_what_is_left_at_its_deadline() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a")
        assert await _drain(router, 100) == 1
        assert not worker.engine.aborted


@pytest.mark.parametrize("said_by", ["nobody", "a stranger", "us to an earlier life", "us"])
async def test_with_ticket_keys_only_who_holds_them_drains_a_worker(said_by: str) -> None:
    ours, strangers = TicketKeys.drawn(), TicketKeys.drawn()
    request = worker_pb2.DrainRequest(deadline_ms=100, incarnation="w1")
    if said_by == "us to an earlier life":
        request.incarnation = "w0"
    if said_by != "nobody":
        (strangers if said_by == "a stranger" else ours).sign_drain(request)
    async with serve(keys=ours) as worker, open_channel(worker.address) as channel:
        router = FakeRouter(channel, "r1")
        call = router.stub.Drain(request, timeout=60)
        if said_by == "us":
            assert (await call).num_left == 0
        else:
            assert isinstance(await error_of(call), errors.AuthenticationError)
        assert worker.servicer.draining == (said_by == "us")


async def test_a_signed_drain_that_was_changed_is_refused() -> None:
    keys = TicketKeys.drawn()
    request = worker_pb2.DrainRequest(deadline_ms=60_000, incarnation="w1")
    keys.sign_drain(request)
    request.deadline_ms = 1
    assert not keys.verify_drain(request)


async def _drain(router: FakeRouter, deadline_ms: int) -> int:
    request = worker_pb2.DrainRequest(deadline_ms=deadline_ms)
    answer = await router.stub.Drain(request, timeout=60)
    return int(answer.num_left)


async def test_a_dead_engine_ends_streams_and_submits() -> None:
    async with serve() as worker, router_of(worker) as router:
        await router.submit("a")
        worker.engine.end(errors.EngineDeadError("the engine process ended with code -9"))
        assert isinstance(await error_of(router.read()), errors.EngineDeadError)
        assert isinstance(await error_of(router.submit("b")), errors.EngineDeadError)
        with pytest.raises(errors.EngineDeadError):
            await worker.pump
