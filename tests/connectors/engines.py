"""Both halves of a page connector over one small cache, stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from diptych.connectors.base import KVConnectorOutput, KVLayout
from diptych.connectors.page_orders import PageMetadata, PageStore
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.connectors.transfers import Transfers
from diptych.engine.request import KVCommit
from tests.connectors.fakes import Request, make_cache, make_layout

OUR_BLOCKS = list(range(30, 0, -1))
PROMPT = list(range(1000, 1150))  # two pages and a tail of 22


class Engine:
    """Both halves over one cache; steps by hand."""

    def __init__(
        self,
        store: PageStore | Callable[[], PageStore],
        block_size: int = 16,
        seed: int | None = None,
        limits: TransferLimits | None = None,
        head_dim: int = 4,
        device: str = "cpu",
    ) -> None:
        layout: KVLayout = make_layout(block_size, head_dim=head_dim)
        self.cache: Tensor = make_cache(layout, seed).to(device)
        self.scheduler = PageConnectorScheduler(layout)
        open_store = store if callable(store) else lambda: store
        self.worker = PageConnectorWorker("TestConnector", open_store, limits)
        self.worker.register_kv_caches(self.cache, layout)

    @property
    def transfers(self) -> Transfers:
        assert self.worker._transfers is not None
        return self.worker._transfers

    def step(self, *scheduled: tuple[Request, int]) -> PageMetadata:
        """Run one step that computes each request up to a number of tokens."""
        orders = {request.request_id: (request, OUR_BLOCKS, n) for request, n in scheduled}
        metadata = self.scheduler.build_connector_meta(orders)
        self.worker.start_load_kv(metadata)
        self.worker.wait_for_save(metadata)
        return metadata

    def wait(self, what: str, request_id: str = "r") -> KVConnectorOutput:
        """The output in which the request is reported."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            output = self.worker.get_finished()
            if request_id in getattr(output, what):
                return output
            time.sleep(0.002)
        raise AssertionError(f"{request_id} is not in {what}")

    def send(self, request: Request) -> KVCommit:
        """Compute and hand over a prompt in one step."""
        self.step((request, len(request.prompt_token_ids)))
        assert self.scheduler.request_finished(request, OUR_BLOCKS)
        return self.wait("finished_sending", request.request_id).commits[request.request_id]

    def order_load(self, request: Request, num_local_tokens: int = 0) -> int:
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local_tokens)
        assert is_async == (tokens > 0)
        self.scheduler.update_state_after_alloc(request, OUR_BLOCKS, tokens)
        return tokens

    def load(self, request: Request, num_local_tokens: int = 0) -> KVConnectorOutput:
        assert self.order_load(request, num_local_tokens) > 0
        self.step()
        return self.wait("finished_recving", request.request_id)


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.worker.shutdown()
            assert not engine.transfers._thread.is_alive()
