"""Workers that hand over to one another: hellos, what engines say to each other, losses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from diptych.clock import SystemClock
from diptych.connectors.tickets import TicketKeys
from diptych.engine.control_messages import (
    Control,
    HandoffFigures,
    PeerDown,
    PeerLink,
    PeerUp,
    ToControl,
)
from diptych.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    StaleTicketError,
)
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION, open_channel
from diptych.services.router.worker_link import LinkTimes, WorkerLink
from diptych.worker import peers
from diptych.worker.peers import PeerStreams, PeerTimes
from tests.services.test_worker_service import error_of
from tests.services.worker_fakes import (
    FakeEngine,
    FakeInfo,
    FakeRouter,
    Served,
    router_of,
    serve,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


@asynccontextmanager
async def worker(
    name: str, role: str = "prefill", life: int = 1, **more: Any
) -> AsyncIterator[Served]:
    info = dataclasses.replace(
        FakeInfo(), handoff_cards=f"cards of {name}{life}".encode(), **more.pop("info", {})
    )
    incarnation = f"{name}{life}"
    async with serve(
        worker_id=name, incarnation=incarnation, role=role, info=info, **more
    ) as served:
        yield served


@dataclasses.dataclass
class Two:
    """A prefill worker p and a decode worker d that may read from it."""

    prefill: Served
    decode: Served
    stub: Any

    @property
    def peer(self) -> worker_pb2.HandoffPeer:
        """The prefill worker, as routers name it."""
        return worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=self.prefill.address)

    def met(self) -> bool:
        return bool(self.prefill.engine.heard and self.decode.engine.heard)


@asynccontextmanager
async def two(grace_s: float = 60.0) -> AsyncIterator[Two]:
    """The two, and a router that told the decode worker of the other."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(worker("p", grace_s=grace_s))
        decode = await stack.enter_async_context(worker("d", "decode", grace_s=grace_s))
        router = await stack.enter_async_context(router_of(decode))
        both = Two(prefill, decode, router.stub)
        hint = worker_pb2.HandoffPeers(peers=[both.peer])
        await router.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
        await until(both.met)
        yield both


def bodies(engine: FakeEngine) -> list[bytes]:
    return [message.body for message in engine.heard if isinstance(message, Control)]


def news(engine: FakeEngine) -> list[ToControl]:
    return [message for message in engine.heard if not isinstance(message, Control)]


async def test_each_engine_learns_of_the_other_and_hears_what_it_says() -> None:
    async with two() as both:
        prefill, decode = both.prefill.engine, both.decode.engine
        assert prefill.heard == [PeerUp("d1", b"cards of d1")]
        assert decode.heard == [PeerUp("p1", b"cards of p1")]
        for number in range(100):
            prefill.say(Control("d1", b"chunk %d" % number))
            decode.say(Control("p1", b"ack %d" % number))
        await until(lambda: len(bodies(prefill)) == len(bodies(decode)) == 100)
        assert bodies(decode) == [b"chunk %d" % number for number in range(100)]
        assert bodies(prefill) == [b"ack %d" % number for number in range(100)]


async def test_a_request_with_an_unknown_peer_opens_a_stream_to_it() -> None:
    async with worker("p") as prefill, worker("d", "decode") as decode:
        async with router_of(decode) as router:
            router.worker = "d1"
            peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=prefill.address)
            await router.submit("r", handoff_peer=peer)
            await until(lambda: prefill.engine.heard)
        assert decode.engine.requests["r#1"].kv_transfer_params.reads_peer


async def test_only_who_a_ticket_names_is_met() -> None:
    """Whoever cannot sign cannot have a worker call addresses, or fill its places for peers."""
    keys = TicketKeys.drawn()
    async with (
        worker("p") as prefill,
        worker("d", "decode", keys=keys) as decode,
        router_of(decode, keys=keys) as router,
    ):
        router.worker = "d1"
        peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=prefill.address)
        forged = router.request("r", handoff_peer=peer)
        forged.ticket.epoch += 1
        assert isinstance(await error_of(router.stub.Submit(forged)), StaleTicketError)
        other = router.request("r", handoff_peer=peer)
        other.handoff_peer.incarnation = "p2"
        caught = await error_of(router.stub.Submit(other))
        assert (type(caught), caught.param) == (InvalidRequestError, "handoff_peer")
        assert not decode.servicer._peers._calls
        assert not decode.engine.requests


async def test_links_that_were_tested_are_told_to_routers() -> None:
    async with two() as both:
        both.decode.engine.say(PeerLink("p1", True, "shm", 3.5))

        async def links() -> list[Any]:
            info = await both.stub.GetInfo(worker_pb2.GetInfoRequest())
            assert info.direct
            return list(info.handoff_links)

        async with asyncio.timeout(60):
            while not (known := await links()):
                await asyncio.sleep(0.01)
        expected = worker_pb2.HandoffLink(incarnation="p1", transport="shm", gb_per_s=3.5)
        assert known == [expected]
        both.decode.engine.say(PeerLink("p1", False, failure="the test failed"))
        async with asyncio.timeout(60):
            while not (known := await links())[0].failure:
                await asyncio.sleep(0.01)
        assert known == [worker_pb2.HandoffLink(incarnation="p1", failure="the test failed")]


async def test_a_peer_that_restarts_is_gone_and_the_new_one_is_a_peer() -> None:
    async with worker("d", "decode") as decode, router_of(decode) as router:
        async with worker("p") as first:
            port = int(first.address.rpartition(":")[2])
            peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=first.address)
            await router.call.write(
                worker_pb2.RouterMessage(handoff_peers=worker_pb2.HandoffPeers(peers=[peer]))
            )
            await until(lambda: decode.engine.heard)
        async with worker("p", life=2, port=port):
            await until(lambda: PeerDown("p1") in decode.engine.heard)
            peer.incarnation = "p2"
            await router.call.write(
                worker_pb2.RouterMessage(handoff_peers=worker_pb2.HandoffPeers(peers=[peer]))
            )
            await until(lambda: PeerUp("p2", b"cards of p2") in decode.engine.heard)
        ups_and_downs = [PeerUp("p1", b"cards of p1"), PeerDown("p1"), PeerUp("p2", b"cards of p2")]
        assert news(decode.engine) == ups_and_downs


async def test_a_decode_worker_that_restarts_is_gone_at_once_for_prefill() -> None:
    async with worker("p", grace_s=60) as prefill:
        for life in (1, 2):
            async with worker("d", "decode", life=life) as decode, router_of(decode) as router:
                peer = worker_pb2.HandoffPeer(
                    worker_id="p", incarnation="p1", address=prefill.address
                )
                hint = worker_pb2.HandoffPeers(peers=[peer])
                await router.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
                await until(lambda: decode.engine.heard)
        assert [type(message) for message in prefill.engine.heard] == [PeerUp, PeerDown, PeerUp]
        assert prefill.engine.heard[1] == PeerDown("d1")


async def test_a_peer_that_stays_away_is_gone_after_its_time() -> None:
    async with worker("d", "decode", grace_s=0.3) as decode, router_of(decode) as router:
        async with worker("p") as prefill:
            peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=prefill.address)
            hint = worker_pb2.HandoffPeers(peers=[peer])
            await router.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
            await until(lambda: decode.engine.heard)
            assert news(decode.engine) == [PeerUp("p1", b"cards of p1")]
        await until(lambda: news(decode.engine)[1:] == [PeerDown("p1")])


async def test_a_stream_that_breaks_is_opened_again_and_nobody_is_gone() -> None:
    async with two() as both, open_channel(both.prefill.address) as channel:
        # the same decode worker, it seems, on another stream: it takes the first one's place
        call = worker_pb2_grpc.WorkerStub(channel).Handoff()
        await greet(call, hello("d", "d1"))
        await call.read()
        await until(lambda: len(both.prefill.engine.heard) >= 2)
        call.cancel()
        await until(lambda: len(both.prefill.engine.heard) == 3)
        both.prefill.engine.say(Control("d1", b"again"))
        await until(lambda: bodies(both.decode.engine) == [b"again"])
        every = news(both.prefill.engine) + news(both.decode.engine)
        assert not [message for message in every if isinstance(message, PeerDown)]


def hello(worker_id: str, incarnation: str, **changes: Any) -> worker_pb2.HandoffHello:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "kv_namespace": FakeInfo().kv_namespace,
        "protocol_version": PROTOCOL_VERSION,
        "cards": b"cards of d1",
        **changes,
    }
    return worker_pb2.HandoffHello(**fields)


def challenge(incarnation: str, nonce: bytes = bytes(range(16))) -> worker_pb2.HandoffFrame:
    return worker_pb2.HandoffFrame(
        challenge=worker_pb2.HandoffChallenge(nonce=nonce, incarnation=incarnation)
    )


async def greet(
    call: Any, mine: worker_pb2.HandoffHello, keys: TicketKeys | None = None
) -> worker_pb2.HandoffChallenge:
    """Call as the worker of a hello does; returns what the other challenges with."""
    await call.write(challenge(mine.incarnation))
    theirs = (await call.read()).challenge
    if keys is not None:
        keys.sign_hello(mine, theirs)
    await call.write(worker_pb2.HandoffFrame(hello=mine))
    return theirs


@pytest.mark.parametrize(
    "frame",
    [
        worker_pb2.HandoffFrame(body=b"early"),
        worker_pb2.HandoffFrame(hello=hello("d", "d1")),
        challenge("d1", b"short"),
    ],
    ids=["a body", "a hello", "a short nonce"],
)
async def test_a_stream_must_begin_with_a_challenge(frame: worker_pb2.HandoffFrame) -> None:
    async with worker("p") as prefill, open_channel(prefill.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Handoff()
        await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert prefill.engine.heard == []


@pytest.mark.parametrize(
    "frame",
    [
        worker_pb2.HandoffFrame(body=b"early"),
        challenge("d1"),
        worker_pb2.HandoffFrame(hello=hello("d", "d2")),
        worker_pb2.HandoffFrame(hello=hello("d", "")),
        worker_pb2.HandoffFrame(hello=hello("d", "d1", cards=b"")),
        worker_pb2.HandoffFrame(hello=hello("d", "d1", kv_namespace="cd" * 32)),
        worker_pb2.HandoffFrame(hello=hello("d", "d1", protocol_version=PROTOCOL_VERSION + 2)),
    ],
    ids=[
        "a body",
        "another challenge",
        "another incarnation",
        "no incarnation",
        "no cards",
        "other KV",
        "other version",
    ],
)
async def test_who_does_not_fit_is_refused(frame: worker_pb2.HandoffFrame) -> None:
    async with worker("p") as prefill, open_channel(prefill.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Handoff()
        await call.write(challenge("d1"))
        await call.read()
        await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert prefill.engine.heard == []


async def test_only_workers_with_the_ticket_keys_are_told_where_memory_lies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, others = TicketKeys.drawn(), TicketKeys.drawn()
    async with worker("p", keys=keys) as prefill, open_channel(prefill.address) as channel:
        for signer in (None, others):
            call = worker_pb2_grpc.WorkerStub(channel).Handoff()
            await greet(call, hello("d", "d1"), signer)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert prefill.engine.heard == []
        async with (
            worker("d", "decode", keys=others, grace_s=0.2) as stranger,
            router_of(stranger, keys=others) as r,
        ):
            peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=prefill.address)
            hint = worker_pb2.HandoffPeers(peers=[peer])
            await r.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
            await until(lambda: "signature does not hold" in caplog.text)
        async with worker("d", "decode", keys=keys) as decode, router_of(decode, keys=keys) as r:
            peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=prefill.address)
            hint = worker_pb2.HandoffPeers(peers=[peer])
            await r.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
            await until(lambda: prefill.engine.heard and decode.engine.heard)


async def test_a_hello_says_nothing_on_another_stream() -> None:
    """Whoever has heard one can neither take its worker's place with it nor learn of memory."""
    keys = TicketKeys.drawn()
    async with worker("p", keys=keys) as prefill, open_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        heard = hello("d", "d1")
        first = stub.Handoff()
        await greet(first, heard, keys)
        assert (await first.read()).hello.cards == b"cards of p1"
        replayed = stub.Handoff()
        await greet(replayed, heard)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await replayed.read()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert prefill.engine.heard == [PeerUp("d1", b"cards of d1")]


class Stranger(worker_pb2_grpc.WorkerServicer):
    """Answers hand-off streams without the keys, and keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[worker_pb2.HandoffFrame] = []

    async def Handoff(self, frames: Any, context: Any) -> AsyncIterator[worker_pb2.HandoffFrame]:
        self.heard.append(await anext(frames))
        yield challenge("p1")
        async for frame in frames:
            self.heard.append(frame)


async def test_a_stranger_who_is_called_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    keys, stranger = TicketKeys.drawn(), Stranger()
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(stranger, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with (
        worker("d", "decode", keys=keys, grace_s=0.2) as decode,
        router_of(decode, keys=keys) as router,
    ):
        peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address=address)
        hint = worker_pb2.HandoffPeers(peers=[peer])
        await router.call.write(worker_pb2.RouterMessage(handoff_peers=hint))
        await until(lambda: "challenge's signature does not hold" in caplog.text)
    await server.stop(None)
    assert stranger.heard
    assert {frame.WhichOneof("frame") for frame in stranger.heard} == {"challenge"}


async def test_only_routers_with_the_ticket_keys_have_a_stream() -> None:
    keys, others = TicketKeys.drawn(), TicketKeys.drawn()
    async with worker("d", "decode", keys=keys) as decode:
        async with open_channel(decode.address) as channel:
            for stranger in (FakeRouter(channel), FakeRouter(channel, keys=others)):
                assert isinstance(await error_of(stranger.open()), AuthenticationError)
            # what a router says to one worker lets nobody speak to another
            hello = worker_pb2.Hello(
                router_incarnation="r1", protocol_version=PROTOCOL_VERSION, audience="another"
            )
            keys.sign_router(hello)
            call = worker_pb2_grpc.WorkerStub(channel).Stream()
            await call.write(worker_pb2.RouterMessage(hello=hello))
            assert isinstance(await error_of(call.read()), AuthenticationError)
        async with router_of(decode, keys=keys):
            pass


async def test_a_router_with_other_keys_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    keys, others = TicketKeys.drawn(), TicketKeys.drawn()
    async with worker("d", "decode", keys=keys) as decode:
        for held, said in ((others, 1), (keys, 0)):
            caplog.clear()
            times = LinkTimes(resume_s=0.1)
            async with WorkerLink(
                decode.address,
                router_incarnation="r",
                clock=SystemClock(),
                keys=held,
                times=times,
            ) as link:
                await until(lambda link=link: link.connected or "other ticket keys" in caplog.text)
                await asyncio.sleep(0.5)  # it goes on trying
            assert caplog.text.count("other ticket keys") == said


async def test_a_worker_whose_memory_cannot_be_read_takes_no_part() -> None:
    async with serve() as served, router_of(served) as router:
        info = await router.stub.GetInfo(worker_pb2.GetInfoRequest())
        assert not info.direct
        peer = worker_pb2.HandoffPeer(worker_id="p", incarnation="p1", address="p:1")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.submit("r", handoff_peer=peer)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        call = router.stub.Handoff()
        await call.write(worker_pb2.HandoffFrame(hello=hello("d", "d1")))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_without_a_hello_is_not_waited_for() -> None:
    engine = FakeEngine(dataclasses.replace(FakeInfo(), handoff_cards=b"cards"))
    times = PeerTimes(hello_s=0.05)
    streams = PeerStreams(engine, hello("p", "p1"), SystemClock(), times)

    class Deaf:
        async def write(self, frame: worker_pb2.HandoffFrame) -> None:
            pass

    async def silence(*frames: worker_pb2.HandoffFrame) -> AsyncIterator[worker_pb2.HandoffFrame]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    for said in ([], [challenge("d1")]):
        with pytest.raises(DeadlineError):
            await streams.answer(silence(*said), Deaf())


async def test_what_a_peer_does_not_take_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded; the engines repeat."""
    monkeypatch.setattr(peers, "MAX_QUEUED", 4)
    engine = FakeEngine(dataclasses.replace(FakeInfo(), handoff_cards=b"cards"))
    streams = PeerStreams(engine, hello("p", "p1"), SystemClock())

    class Stuck:
        async def write(self, frame: worker_pb2.HandoffFrame) -> None:
            if frame.HasField("body"):
                await asyncio.Event().wait()

    async def frames() -> AsyncIterator[worker_pb2.HandoffFrame]:
        yield challenge("d1")
        yield worker_pb2.HandoffFrame(hello=hello("d", "d1"))
        await asyncio.Event().wait()

    tasks = [
        asyncio.create_task(streams.answer(frames(), Stuck())),
        asyncio.create_task(streams.pump()),
    ]
    await until(lambda: engine.heard)
    for _ in range(10):
        engine.say(Control("d1", b"body"))
    await until(lambda: streams.num_dropped >= 5)
    await streams.close()
    engine.end()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_worker_whose_engine_says_no_more_is_asked_for_no_direct_hand_offs() -> None:
    async with two() as both:
        both.decode.engine.say(PeerLink("p1", True, "shm", 3.5))

        async def info() -> worker_pb2.WorkerInfo:
            return await both.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)

        async with asyncio.timeout(60):
            while not (await info()).handoff_links:
                await asyncio.sleep(0.01)
            assert (await info()).direct
            both.decode.engine._controls.put_nowait(None)
            while (await info()).direct:
                await asyncio.sleep(0.01)
        assert not (await info()).handoff_links


async def test_what_became_of_hand_offs_is_shown_in_metrics() -> None:
    async with two() as both:
        figures = HandoffFigures(
            num_read=3,
            num_not_read=1,
            num_given_to_store=6,
            num_taken_from_store=7,
            num_tokens_given=40,
            num_received=5,
            num_tokens_received=70,
            num_corrupt=1,
            num_ignored_events=2,
            read_seconds=1.25,
            late_seconds=0.5,
            failures={"a checksum is wrong": 1, "no verdict came in time": 2},
        )
        both.decode.engine.say(figures)
        both.decode.engine.say(PeerLink("p1", True, "shm", 3.5))
        expected = {
            ("diptych:handoffs_given_total", "result", "read"): 3,
            ("diptych:handoffs_given_total", "result", "not_read"): 1,
            ("diptych:handoffs_given_total", "result", "left_to_store"): 6,
            ("diptych:handoffs_received_total", "result", "left_to_store"): 7,
            ("diptych:handoffs_received_total", "result", "valid"): 5,
            ("diptych:handoffs_received_total", "result", "corrupt"): 1,
            ("diptych:handoffs_received_total", "result", "failed"): 2,
            ("diptych:handoff_failures_total", "reason", "no verdict came in time"): 2,
            ("diptych:handoff_bytes_total", "direction", "given"): 40 * 64,
            ("diptych:handoff_bytes_total", "direction", "received"): 70 * 64,
            ("diptych:handoff_messages_ignored_total", "why", "no rule"): 2,
            ("diptych:handoff_read_seconds_total", "model_name", "tiny"): 1.25,
            ("diptych:handoff_thread_late_seconds_total", "model_name", "tiny"): 0.5,
            ("diptych:handoff_link_bytes_per_second", "transport", "shm"): 3.5e9,
        }

        def shown() -> dict[tuple[str, str, str], float]:
            samples = [s for family in both.decode.registry.collect() for s in family.samples]
            found = {}
            for name, label, value in expected:
                of_it = [s for s in samples if s.name == name and s.labels.get(label) == value]
                found[name, label, value] = sum(sample.value for sample in of_it)
            return found

        await until(lambda: shown() == expected)
