"""The engine core: schedule, execute, update.

With `async_scheduling` one step is planned and given to the device before the results of the one
before it are taken: the device has its next step while the host handles the last one's results.
Where KV is about to arrive from a peer, that step is planned as late as it can be, so that whoever
waits for the KV is in it.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from diptych.config import EngineConfig
from diptych.connectors.base import KVConnectorScheduler, StepStage
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from diptych.engine.scheduler import Scheduler
from diptych.engine.step import Executor, ModelRunnerOutput, SchedulerOutput, StepHandle
from diptych.engine.step_times import StepTimes
from diptych.errors import EngineDeadError

if TYPE_CHECKING:
    from diptych.engine.control_port import ControlPort

logger = logging.getLogger(__name__)


class EngineState(enum.Enum):
    """Whether the engine can still step."""

    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What others need to know of an engine."""

    kv_namespace: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_queued_reqs: int
    # how its KV pool can be read by peers (`connectors.peer_reads.encode_cards`); empty: it cannot
    handoff_cards: bytes = b""
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that ended as it was given."""

    output: ModelRunnerOutput

    def wait(self, saving: bool) -> None:
        return None

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose results have not been taken."""

    step: SchedulerOutput
    handle: StepHandle

    @property
    def computes(self) -> bool:
        return bool(self.step.num_scheduled_tokens)


class EngineCore:
    """One engine, driven by whoever calls `step`. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        connector: KVConnectorScheduler | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._monotonic = monotonic
        self._times = StepTimes(monotonic)
        self._connector = connector
        self._scheduler = Scheduler(config, executor.kv_layout, executor.kv_namespace, connector)
        self._is_async = bool(config.async_scheduling)
        self._flight: _Flight | None = None
        self._broken: Exception | None = None
        self._last_stats = self._scheduler.stats
        self._computed_nothing = False
        self.failure = ""
        self.state = EngineState.READY
        self.info = EngineInfo(
            kv_namespace=executor.kv_namespace.hex(),
            max_model_len=self._scheduler.max_model_len,
            num_kv_blocks=executor.kv_layout.num_blocks,
            block_size=executor.kv_layout.block_size,
            max_num_seqs=self._scheduler.max_num_seqs,
            max_num_queued_reqs=config.max_num_queued_reqs,
            handoff_cards=connector.handoff_cards if connector is not None else b"",
            kv_bytes_per_token=executor.kv_layout.bytes_per_token,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self.state is not EngineState.READY:
            return False
        return self._scheduler.has_requests or self._flight is not None

    @property
    def is_waiting_for_transfers(self) -> bool:
        """Whether nothing is there to compute: only the outside can bring work on."""
        return self._computed_nothing

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def attach_control(self, port: ControlPort) -> None:
        """Give the connector its way to peers; one that has none closes it."""
        if self._connector is None:
            port.close()
        else:
            self._connector.attach_control(port)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
            CapacityError: the queue is full.
            EngineDeadError: the engine has failed.
        """
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state.value}: {self.failure}")
        self._scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each that was known gets a last entry in the next step's outputs."""
        if self._connector is not None:
            # a transfer that the step in flight begins has begun before it is given up
            try:
                self._settle()
            except Exception as error:
                self._broken = error
        self._scheduler.abort_requests(request_ids)

    def step(self) -> EngineCoreOutputs | None:
        """Run one step, or begin it and end the one before; None if there is nothing to report.

        If it fails, every request ends with an error entry and the state is FAILED.
        """
        try:
            if self._broken is not None:
                raise self._broken
            # what has just been loaded computes in the next step: nothing is waited for
            self._computed_nothing = not (self._advance() or self._scheduler.has_loaded)
            return self._changed(self._scheduler.take_outputs())
        except Exception as error:
            logger.exception("a step failed")
            return self._fail(error)

    def note_sent(self) -> None:
        """What the last step gave is on its way to whoever waits for it."""
        if self._connector is not None:
            self._connector.note_step(StepStage.SENT, ())

    def close(self) -> None:
        """Release the device and the connector. Idempotent."""
        if self.state is not EngineState.CLOSED:
            self.state = EngineState.CLOSED
            self._flight = None
            self._executor.shutdown()
            if self._connector is not None:
                self._connector.shutdown()

    def _advance(self) -> bool:
        """Begin the next step and settle the one in flight; whether either computed anything."""
        computed = False
        if self._flight is not None and not self._goes_ahead(self._flight):
            if not self._await(self._flight):
                return True
            computed = self._settle()
            if self._scheduler.has_handed_off:
                # a prompt takes milliseconds to launch: the token that was sampled, and the word
                # that KV is there, go first
                return computed
            if self._hold_until_s(self._monotonic()):
                return True  # what the step gave goes out meanwhile
        elif self._flight is None and (hold_s := self._hold_until_s(self._monotonic())):
            assert self._connector is not None
            self._connector.await_arrival(hold_s, first=True)
        self._take_arrived()
        begun = self._begin() if self._scheduler.has_requests else None
        computed |= self._settle()
        self._flight = begun
        if not self._is_async:
            return self._settle() or computed
        return computed or (begun is not None and begun.computes)

    def _goes_ahead(self, flight: _Flight) -> bool:
        """Whether the next step is planned while this one runs. Where KV is about to arrive that is
        not before it must be, and not at all where it comes soon after this one has ended: a step
        planned without it would keep it waiting to the end."""
        if not flight.computes or not self._scheduler.can_plan_ahead:
            return False
        if self._connector is None or not self._connector.is_expecting:
            return True
        launch_at_s, end_s = self._times.launch_at_s, self._times.end_s
        if launch_at_s is None or end_s is None:
            return False
        self._connector.await_arrival(launch_at_s, first=False)
        return not self._hold_until_s(end_s)

    def _hold_until_s(self, from_s: float) -> float:
        """Until when no step is begun for the sake of KV that is about to arrive, if the device has
        none from `from_s` on; 0: the next may begin."""
        if self._connector is None:
            return 0.0
        limit_s = from_s + self._times.most_held_s
        return min(self._connector.hold_until_s(limit_s), limit_s)

    def _await(self, flight: _Flight) -> bool:
        """Wait for the step; False where a hand-off's save has ended first, which is to be told."""
        since_s = self._monotonic()
        sent = flight.handle.wait(self._scheduler.is_saving)
        if sent is not None:
            self._scheduler.finish_saves(sent)
            return False
        if flight.computes:
            self._times.waited(since_s)
        return True

    def _take_arrived(self) -> None:
        """Have whose KV has arrived in the step that is planned next."""
        arrived = None if self._connector is None else self._connector.take_arrived()
        if arrived is not None:
            self._scheduler.take_transfers(arrived)

    def _begin(self) -> _Flight:
        """Plan a step and give it to the device."""
        begun_s = self._monotonic()
        step = self._scheduler.schedule()
        if not (step.num_scheduled_tokens or step.finished_request_ids or self._connector):
            return _Flight(step, _Done(ModelRunnerOutput()))
        if not self._is_async:
            return _Flight(step, _Done(self._executor.execute_model(step)))
        flight = _Flight(step, self._executor.submit_step(step))
        if flight.computes:
            counts = step.num_scheduled_tokens
            self._times.launched(begun_s, decodes=sum(counts.values()) == len(counts))
            self._note(StepStage.LAUNCHED, step)
        return flight

    def _settle(self) -> bool:
        """Take the results of the step in flight, if any; whether it computed anything."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        since_s = self._monotonic()
        output = flight.handle.result()
        if self._is_async and flight.computes:
            self._times.waited(since_s)
            self._times.settled()
        self._scheduler.update(flight.step, output)
        if not self._is_async:
            self._note(StepStage.LAUNCHED, flight.step)
        self._note(StepStage.KNOWN, flight.step)
        if self._scheduler.has_handed_off and self._connector is not None:
            self._connector.flush()
        return flight.computes

    def _note(self, stage: StepStage, step: SchedulerOutput) -> None:
        if self._connector is not None:
            self._connector.note_step(stage, step.num_scheduled_tokens)

    def _fail(self, error: Exception) -> EngineCoreOutputs:
        self._flight = None
        self.state = EngineState.FAILED
        self.failure = f"{type(error).__name__}: {error}"
        return self._scheduler.fail_requests(f"the engine failed: {self.failure}")

    def _changed(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs | None:
        """The outputs, unless they have no entry and the state is what was reported last."""
        if not outputs.request_ids and outputs.stats == self._last_stats:
            return None
        self._last_stats = outputs.stats
        return outputs


def make_engine_core(config: EngineConfig) -> EngineCore:
    """Load the model and build the engine that serves it in this process.

    Raises:
        ModelLoadError: the model is missing, broken or not supported.
        ConfigError: a setting does not fit the device or the connector.
    """
    # Read when torch is first imported. OpenMP's threads spin for milliseconds by default: on a
    # machine with other work that slows an engine tenfold, not to spin at all halves it when idle.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from diptych.connectors.factory import make_scheduler_connector, make_worker_connector
    from diptych.engine.executor import UniprocExecutor

    worker = make_worker_connector(config)
    executor = UniprocExecutor(config, worker)
    try:
        layout, namespace = executor.kv_layout, executor.kv_namespace
        connector = make_scheduler_connector(config, layout, namespace, worker)
        return EngineCore(executor.config, executor, connector)
    except BaseException:
        executor.shutdown()
        raise
