"""A range read from all ranks of a worker is one read: pure, and over real transports."""

import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from diptych.connectors.peer_reads import (
    PeerReads,
    RangeRead,
    RangeResult,
    RankCard,
    decode_cards,
    encode_cards,
    geometry_of,
)
from diptych.connectors.plan import BlockTable
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.base import Endpoint, ReadFailure, ReadState
from diptych.connectors.transports.choose import open_transports
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.orders import ReadOrder, ReadResult
from diptych.connectors.transports.thread import TransferThread
from diptych.errors import TransferError
from tests.connectors import fakes

BLOCKS = BlockTable.of([2, 0, 3])
ENDPOINT = Endpoint(incarnation="p", boot_id="", regions={}, devices={}, offers=[])


class FakeReads:
    """Notes orders; ends them when told."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.orders: dict[str, ReadOrder] = {}
        self.cancelled: list[str] = []
        self._results: list[ReadResult] = []

    def connect(self, peer_id: str, endpoint: Endpoint) -> None:
        self.peers.add(peer_id)

    def disconnect(self, peer_id: str) -> None:
        self.peers.discard(peer_id)

    def read(self, order: ReadOrder) -> None:
        self.orders[order.read_id] = order

    def cancel(self, read_id: str) -> None:
        self.cancelled.append(read_id)

    def tell(self, read_id: str, state: ReadState, failure: ReadFailure | None = None) -> None:
        size = self.orders[read_id].runs.num_bytes
        self._results.append(ReadResult(read_id, state, failure, "why", size, 0.5, "tcp"))

    def take_results(self) -> list[ReadResult]:
        results, self._results = self._results, []
        return results


def pool(heads: Span, block_size: int = 16) -> PoolGeometry:
    return PoolGeometry(
        num_blocks=8, block_size=block_size, heads=heads, layers=Span(0, 2), atom_bytes=8
    )


def cards(*heads: Span, namespace: str = "ns") -> list[RankCard]:
    return [
        RankCard(kv_namespace=namespace, rank=rank, geometry=pool(span), endpoint=ENDPOINT)
        for rank, span in enumerate(heads)
    ]


def a_range(read_id: str = "r", end: int = 40) -> RangeRead:
    return RangeRead(
        read_id=read_id,
        incarnation="p",
        source_blocks=BLOCKS,
        target_blocks=BLOCKS,
        start_token=0,
        end_token=end,
        deadline_s=1e9,
    )


@pytest.fixture
def fake() -> FakeReads:
    return FakeReads()


@pytest.fixture
def reads(fake: FakeReads) -> PeerReads:
    reads = PeerReads(fake, pool(Span(0, 4)), "ns")
    reads.connect("p", cards(Span(0, 2), Span(2, 4)))
    return reads


def states(results: list[RangeResult]) -> list[tuple[str, ReadState, ReadFailure | None]]:
    return [(result.read_id, result.state, result.failure) for result in results]


def test_a_range_is_done_when_every_rank_gave_its_share(fake: FakeReads, reads: PeerReads) -> None:
    reads.read(a_range())
    assert fake.orders.keys() == {"r#0", "r#1"}
    assert {order.peer_id for order in fake.orders.values()} == fake.peers == {"p/0", "p/1"}
    fake.tell("r#1", ReadState.DONE)
    assert reads.take_results() == []
    fake.tell("r#0", ReadState.DONE)
    [result] = reads.take_results()
    assert result == RangeResult(
        "r", ReadState.DONE, None, "", 3 * 16 * 4 * 2 * 2 * 8, 0.5, frozenset({"tcp"})
    )
    assert reads.num_open == 0


def test_a_range_that_lost_a_share_is_over_only_with_its_last_one(
    fake: FakeReads, reads: PeerReads
) -> None:
    reads.read(a_range())
    fake.tell("r#0", ReadState.FAILED, ReadFailure.PEER_GONE)
    # rank 1 may still write into the range's blocks
    assert states(reads.take_results()) == [("r", ReadState.QUARANTINED, ReadFailure.PEER_GONE)]
    assert fake.cancelled == ["r#1"]
    fake.tell("r#1", ReadState.QUARANTINED, ReadFailure.CANCELLED)
    assert reads.take_results() == []
    assert reads.num_open == 1
    fake.tell("r#1", ReadState.FAILED, ReadFailure.CANCELLED)
    assert states(reads.take_results()) == [("r", ReadState.FAILED, ReadFailure.PEER_GONE)]
    assert reads.num_open == 0


def test_a_share_that_comes_after_all_does_not_mend_the_range(
    fake: FakeReads, reads: PeerReads
) -> None:
    reads.read(a_range())
    fake.tell("r#1", ReadState.QUARANTINED, ReadFailure.DEADLINE)
    fake.tell("r#0", ReadState.DONE)
    assert states(reads.take_results()) == [("r", ReadState.QUARANTINED, ReadFailure.DEADLINE)]
    fake.tell("r#1", ReadState.FAILED, ReadFailure.DEADLINE)
    assert states(reads.take_results()) == [("r", ReadState.FAILED, ReadFailure.DEADLINE)]


def test_cancelling_asks_every_share_to_end(fake: FakeReads, reads: PeerReads) -> None:
    reads.read(a_range())
    reads.cancel("r")
    reads.cancel("unknown")
    assert fake.cancelled == ["r#0", "r#1"]
    for share in ("r#0", "r#1"):
        fake.tell(share, ReadState.FAILED, ReadFailure.CANCELLED)
    assert states(reads.take_results())[-1] == ("r", ReadState.FAILED, ReadFailure.CANCELLED)


def test_what_cannot_be_planned_fails_without_a_read(fake: FakeReads, reads: PeerReads) -> None:
    reads.read(a_range("long", end=49))
    reads.read(replace(a_range("nobody"), incarnation="q"))
    reads.read(a_range("twice"))
    reads.read(a_range("twice"))
    assert states(reads.take_results()) == [
        ("long", ReadState.FAILED, ReadFailure.REFUSED),
        ("nobody", ReadState.FAILED, ReadFailure.PEER_GONE),
        ("twice", ReadState.FAILED, ReadFailure.REFUSED),
    ]
    assert reads.num_open == 1


def test_a_worker_of_another_model_is_refused(reads: PeerReads) -> None:
    with pytest.raises(TransferError, match="another model, revision or dtype"):
        reads.connect("q", cards(Span(0, 4), namespace="other"))
    with pytest.raises(TransferError, match="no source holds heads 2-3"):
        reads.connect("q", cards(Span(0, 2)))


def test_only_ranks_that_are_read_are_met(fake: FakeReads) -> None:
    replicas = [Span(0, 4)] * 4
    reads = PeerReads(fake, pool(Span(0, 4)), "ns", rank=2)
    reads.connect("p", cards(*replicas))
    assert fake.peers == {"p/2"}
    assert reads.source_ranks("p") == {2}
    reads.disconnect("p")
    reads.disconnect("p")
    assert not fake.peers
    assert reads.source_ranks("p") == frozenset()


def test_cards_travel() -> None:
    both = cards(Span(0, 2), Span(2, 4))
    assert decode_cards(encode_cards(both[::-1])) == both
    with pytest.raises(TransferError, match="cannot be read"):
        decode_cards(b"\x91\x81")
    with pytest.raises(TransferError, match="cannot be read"):
        decode_cards(b"\x91\x81\xa2zz" + b"\x91" * 100_000 + b"\xc0")
    old = msgspec.structs.replace(both[0], endpoint=msgspec.structs.replace(ENDPOINT, version=0))
    with pytest.raises(TransferError, match="version 0"):
        decode_cards(encode_cards([old]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_an_engines_cache_has_a_geometry(dtype: str) -> None:
    layout = fakes.make_layout(16, dtype=dtype)
    geometry = geometry_of(layout)
    cache = torch.empty(layout.shape, dtype=getattr(torch, dtype))
    assert geometry.num_bytes == cache.numel() * cache.element_size()
    strides = geometry.strides()
    axes = ("head", "layer", "part", "slot")
    assert [strides[axis] for axis in axes] == [
        stride * cache.element_size() for stride in cache.stride()[1:5]
    ]
    with pytest.raises(TransferError, match="KV of int3"):
        geometry_of(replace(layout, dtype="int3"))


def test_two_ranks_are_read_into_one_over_real_transports() -> None:
    rng = np.random.default_rng(0)
    sources, published = [], []
    for rank in range(2):
        geometry = pool(Span(2 * rank, 2 * rank + 2))
        memory = HostMemory.shared(geometry.num_bytes)
        memory.array[:] = rng.integers(0, 256, geometry.num_bytes, np.uint8)
        thread = TransferThread(open_transports(["tcp", "shm"]), memory, f"p{rank}")
        sources.append((memory, thread))
        published.append(
            RankCard(kv_namespace="ns", rank=rank, geometry=geometry, endpoint=thread.start())
        )
    target = pool(Span(0, 4), block_size=32)
    memory = HostMemory.shared(target.num_bytes)
    thread = TransferThread(open_transports(["tcp", "shm"]), memory, "d")
    thread.start()
    reads = PeerReads(thread, target, "ns")
    reads.connect("p", decode_cards(encode_cards(published)))
    reads.read(
        RangeRead(
            read_id="r",
            incarnation="p",
            source_blocks=BLOCKS,
            target_blocks=BlockTable.of([5, 1]),
            start_token=0,
            end_token=48,
            deadline_s=time.monotonic() + 60,
        )
    )
    results: list[RangeResult] = []
    end_s = time.monotonic() + 60
    while not results and time.monotonic() < end_s:
        results = reads.take_results()
        time.sleep(0.001)
    assert states(results) == [("r", ReadState.DONE, None)]
    # [block, head, layer, part, slot, atom]
    got = memory.array.reshape(8, 4, 2, 2, 32, 8)
    for rank, (source, _) in enumerate(sources):
        theirs = source.array.reshape(8, 2, 2, 2, 16, 8)
        for token in range(48):
            ours = got[[5, 1][token // 32], 2 * rank : 2 * rank + 2, :, :, token % 32]
            np.testing.assert_array_equal(ours, theirs[[2, 0, 3][token // 16], :, :, :, token % 16])
    for _, other in sources:
        other.close()
    thread.close()
