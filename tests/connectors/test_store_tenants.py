"""What one tenant stores is on its account, from the request to the node."""

from __future__ import annotations

from diptych.connectors.store import ServiceStore
from diptych.connectors.store_settings import StoreSettings
from diptych.proto import kvstore_pb2 as pb
from tests.connectors.engines import Engine, running
from tests.connectors.fakes import producer
from tests.services.test_kvstore import control, running_node


def test_a_tenant_fills_its_quota_and_no_more() -> None:
    with running_node(pool_bytes=1 << 20, tenant_quota=0.25) as node:
        settings = StoreSettings(kvstore=node.address)
        prefill = Engine(lambda: ServiceStore(settings.open(timeout_s=60.0)), seed=1, head_dim=16)
        with running(prefill):
            for number in range(4):
                request = producer(str(number), [number, *range(300)])
                request.tenant = "alice"
                prefill.send(request)
            stats = control(node).GetStats(pb.GetStatsRequest())
            assert 0 < stats.tenant_bytes["alice"] <= 1 << 18
            bob = producer("b", [9, *range(300)])
            bob.tenant = "bob"
            assert prefill.send(bob).num_tokens == 301
            after = control(node).GetStats(pb.GetStatsRequest())
            assert after.tenant_bytes["alice"] == stats.tenant_bytes["alice"]
