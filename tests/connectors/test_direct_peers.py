"""Which peers' KV is compared by checksums, by the link that it comes over."""

import pytest

from diptych.connectors.direct_peers import DirectPeers
from diptych.connectors.peer_reads import PeerReads, RankCard
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.base import Endpoint
from diptych.connectors.transports.links import LinkState
from diptych.connectors.transports.orders import LinkReport

POOL = PoolGeometry(num_blocks=4, block_size=16, heads=Span(0, 2), layers=Span(0, 2), atom_bytes=32)
ENDPOINT = Endpoint(incarnation="p", boot_id="", regions={}, devices={}, offers=[])


class Links:
    """A transfer thread whose links all run over one transport."""

    def __init__(self, transport: str) -> None:
        self._transport = transport

    def connect(self, peer_id: str, endpoint: Endpoint) -> None: ...

    def links(self) -> dict[str, LinkReport]:
        return {"p/0": LinkReport("p/0", LinkState.READY, self._transport, 9.0, {})}


@pytest.mark.parametrize(
    ("transport", "on_gpu", "verify_kv", "compared"),
    [
        ("cuda_ipc", True, None, False),
        ("nixl", True, None, False),
        ("nixl", False, None, True),
        ("tcp", True, None, True),
        ("shm", False, None, True),
        ("cuda_ipc", True, True, True),
        ("tcp", True, False, False),
    ],
)
def test_all_but_links_of_gpus_are_verified_unless_told_otherwise(
    transport: str, on_gpu: bool, verify_kv: bool | None, compared: bool
) -> None:
    links = Links(transport)
    peers = DirectPeers(
        PeerReads(links, POOL, "ns"),
        links,
        lambda link: None,
        lambda: 0.0,
        geometry=POOL,
        reads_peers=True,
        verify_kv=verify_kv,
        on_gpu=on_gpu,
    )
    peers.meet("p", [RankCard(kv_namespace="ns", rank=0, geometry=POOL, endpoint=ENDPOINT)])
    # not before it is known what it comes over, unless nothing is compared anyway
    assert (peers.source_block("p") > 0) is (verify_kv is not False)
    for _ in range(2):
        peers.tick()
    assert (peers.source_block("p") > 0) is compared
