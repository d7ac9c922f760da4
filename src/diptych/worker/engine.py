"""What the service needs of an engine; `diptych.engine.core_client.EngineCoreClient` has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from diptych.engine.control_messages import FromControl, ToControl
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

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token."""
        ...

    @property
    def handoff_cards(self) -> bytes:
        """How peers can read its KV pool; empty where they cannot."""
        ...


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

    def send_control(self, message: ToControl) -> None:
        """Pass a message of a peer, or news of it, on at once and without a promise."""
        ...

    def controls(self) -> AsyncIterator[FromControl]:
        """What the engine says to its peers and of them, until it is closed. For one reader."""
        ...

    async def close(self) -> None:
        """End the engine process. Idempotent."""
        ...
