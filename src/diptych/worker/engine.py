"""What the service needs of an engine; `diptych.engine.core_client.EngineCoreClient` has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest


class EngineInfo(Protocol):
    """What an engine is once it is ready."""

    @property
    def kv_namespace(self) -> str:
        """Hex digest of what makes KV compatible."""
        ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_kv_blocks(self) -> int: ...


class Engine(Protocol):
    """A running engine."""

    @property
    def info(self) -> EngineInfo: ...

    async def submit(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests and free what they hold; unknown ids are ignored."""
        ...

    def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """Each step's results, in order, until the engine is closed.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def close(self) -> None:
        """End the engine process. Idempotent."""
        ...
