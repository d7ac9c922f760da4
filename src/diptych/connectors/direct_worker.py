"""The worker half of the DirectConnector: owns the hand-off thread, says when KV is there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorker,
    KVLayout,
    StepStage,
)
from diptych.connectors.direct_driver import DirectDriver
from diptych.connectors.direct_scheduler import DirectMetadata
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.kv_checksums import checksums_of
from diptych.connectors.peer_reads import geometry_of
from diptych.connectors.transports.memory import memory_of
from diptych.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from torch import Tensor


_log = logging.getLogger(__name__)


class DirectWorker(KVConnectorWorker):
    """Reads are the thread's own; steps only announce and collect."""

    def __init__(
        self,
        settings: DirectSettings,
        *,
        reads_peers: bool = True,
        other: KVConnectorWorker | None = None,
    ) -> None:
        """`other` moves the KV of requests that have no peer."""
        self._settings = settings
        self._reads_peers = reads_peers
        self._other = other
        self._driver: DirectDriver | None = None

    @property
    def driver(self) -> DirectDriver | None:
        """Once the cache is registered; None where no transport can reach it, and every request is
        the other connector's."""
        return self._driver

    @property
    def other(self) -> KVConnectorWorker | None:
        """What moves the KV of requests that have no peer."""
        return self._other

    def register_kv_caches(self, kv_cache: Tensor, layout: KVLayout) -> None:
        """
        Raises:
            ConfigError: direct hand-offs are required, and no transport can reach the cache.
        """
        memory = memory_of(kv_cache, layout.memfd)
        checksums = None
        if self._settings.verify_kv is not False:
            checksums = checksums_of(kv_cache, geometry_of(layout))
        try:
            self._driver = DirectDriver(
                self._settings,
                memory,
                layout,
                checksums=checksums,
                reads_peers=self._reads_peers,
                stores=self._other is not None,
            )
        except TransferError as error:
            if self._settings.required:
                raise ConfigError(
                    f"KV is to go from worker to worker, but {error.message}; set kv_transports to "
                    "others, or handoff to auto",
                    param="kv_transports",
                ) from error
            instead = "computed anew" if self._other is None else "moved through the store"
            _log.error("no direct hand-offs, KV is %s: %s", instead, error.message)
        if self._other is not None:
            self._other.register_kv_caches(kv_cache, layout)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        if self._driver is not None:
            self._driver.reports.first_steps.note(StepStage.WRITTEN, ())
        other = self._for_other(metadata)
        if self._other is not None and other is not None:
            self._other.start_load_kv(other)

    def wait_for_layer_load(self, layer: int) -> None:
        if self._other is not None:
            self._other.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        if self._other is not None:
            self._other.save_kv_layer(layer)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        if self._driver is not None and isinstance(metadata, DirectMetadata):
            for chunk in metadata.chunks:
                self._driver.computed(chunk.request_id, chunk.num_tokens, chunk.block_ids)
        other = self._for_other(metadata)
        if self._other is not None and other is not None:
            self._other.wait_for_save(other)

    def get_finished(self) -> KVConnectorOutput:
        ours = KVConnectorOutput() if self._driver is None else self._driver.reports.take()
        if self._other is not None:
            _merge(ours, self._other.get_finished())
        return ours

    def take_sent(self) -> KVConnectorOutput | None:
        sent = None if self._driver is None else self._driver.reports.take_sent()
        if sent is None and self._other is not None:
            return self._other.take_sent()
        return sent

    def _for_other(self, metadata: KVConnectorMetadata) -> KVConnectorMetadata | None:
        """The other connector's part: all of it where there is no driver."""
        return metadata.other if isinstance(metadata, DirectMetadata) else metadata

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._other is None else self._other.get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        if self._driver is not None:
            self._driver.close()
        if self._other is not None:
            self._other.shutdown()


def _merge(into: KVConnectorOutput, more: KVConnectorOutput) -> None:
    """Requests are of one connector or the other."""
    into.finished_sending |= more.finished_sending
    into.finished_recving |= more.finished_recving
    into.failed_recving.update(more.failed_recving)
    into.commits.update(more.commits)
    into.saved |= more.saved
    into.num_dropped_saves += more.num_dropped_saves
    into.num_corrupt += more.num_corrupt
    into.rates = more.rates
