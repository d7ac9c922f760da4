"""Concurrent use in one program: answers stream while they grow; the engine is a process."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from diptych.engine.arguments import engine_config
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, FinishReason
from diptych.errors import DiptychError, EngineDeadError, EngineError, InvalidRequestError
from diptych.inputs import PromptType, parse_prompt
from diptych.models.config import ModelConfig
from diptych.outputs import RequestOutput
from diptych.sampling_params import SamplingParams
from diptych.text.chat_template import ChatTemplate
from diptych.text.output_processor import OutputProcessor, RequestState
from diptych.text.processor import Processor
from diptych.text.tokenizer import Tokenizer


class EngineClient(Protocol):
    """What is needed of `EngineCoreClient`."""

    async def submit(self, request: EngineCoreRequest) -> None: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    def outputs(self) -> AsyncIterator[EngineCoreOutputs]: ...
    async def close(self) -> None: ...


class AsyncLLM:
    """One model in an engine process of its own, for use from one event loop.

    The arguments are those of `LLM`. The engine starts with the first `generate`, with `start`, or
    with `async with`; it ends with `shutdown`.
    """

    def __init__(self, model: str = "smollm2", **arguments: Any) -> None:
        self.config = engine_config(model, arguments)
        self._rng = random.Random(self.config.seed)
        self._starting = asyncio.Lock()
        self._engine: _RunningEngine | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model; returns when requests can run. Idempotent.

        Raises:
            ModelLoadError, ConfigError: as `LLM`.
            EngineDeadError: the engine did not come up, or this has been shut down.
        """
        async with self._starting:
            if self._closed:
                raise EngineDeadError("this AsyncLLM has been shut down")
            if self._engine is None:
                self._engine = await self._start_engine()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; each item has the answer so far, the last one is `finished`.

        A reader that is slower than the engine gets fewer, longer items. Closing the generator, or
        cancelling the task that reads it, aborts the request.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid, or the id is in use.
            EngineError: the engine failed.
        """
        await self.start()
        assert self._engine is not None
        parsed = parse_prompt(prompt)
        params = SamplingParams() if sampling_params is None else sampling_params
        # the tokenizer releases the GIL: a long prompt does not hold up the other streams
        request = await asyncio.to_thread(
            self._engine.processor.completion, parsed["prompt"], params
        )
        call = await self._engine.submit(
            request.to_engine(
                request_id or uuid.uuid4().hex,
                priority=priority,
                arrival_time_s=time.monotonic(),
                cache_salt=parsed["cache_salt"],
            ),
            request,
        )
        async with call:
            async for output in call:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, with finish reason "abort"."""
        if self._engine is not None:
            await self._engine.abort(request_id)

    async def shutdown(self) -> None:
        """End the engine; running requests fail. Idempotent."""
        self._closed = True
        async with self._starting:
            engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once started."""
        if self._engine is None:
            raise EngineDeadError("the engine has not been started")
        return self._engine.processor.tokenizer

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def _start_engine(self) -> _RunningEngine:
        from diptych.engine.core_client import EngineCoreClient
        from diptych.models.fetch import resolve_model

        config = self.config
        path = await asyncio.to_thread(resolve_model, config.model, config.revision)
        client = EngineCoreClient()
        await client.start(dataclasses.replace(config, model=str(path)))
        processor = Processor(
            ModelConfig.from_directory(path),
            Tokenizer.from_directory(path),
            ChatTemplate.from_directory(path),
            max_model_len=client.info.max_model_len,
            max_logprobs=config.max_logprobs,
            rng=self._rng,
            clamp_max_tokens=True,
        )
        return _RunningEngine(client, processor)


class _RunningEngine:
    """The client, the states of its requests, and the task that joins the two."""

    def __init__(self, client: EngineClient, processor: Processor) -> None:
        self.processor = processor
        self._client = client
        self._outputs = OutputProcessor(processor.tokenizer)
        self._calls: dict[str, _Call] = {}
        self._failure: DiptychError | None = None
        self._reader = asyncio.create_task(self._read())

    async def submit(self, engine_request: EngineCoreRequest, request: Any) -> _Call:
        request_id = engine_request.request_id
        if self._failure is not None:
            raise self._failure
        if request_id in self._calls:
            raise InvalidRequestError(f"request id {request_id} is in use", param="request_id")
        call = self._calls[request_id] = _Call(self, self._outputs.add(request_id, request))
        try:
            await self._client.submit(engine_request)
        except BaseException:
            self.forget(request_id)
            raise
        return call

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is None:
            return
        call.state.end(FinishReason.ABORT)
        call.changed.set()
        await self.release(request_id)

    async def release(self, request_id: str) -> None:
        """Forget a request; the engine ends it if it has not."""
        if self.forget(request_id) and self._failure is None:
            await self._client.abort([request_id])

    def forget(self, request_id: str) -> bool:
        """Drop the state; true if the engine may still work on it."""
        self._calls.pop(request_id, None)
        return self._outputs.drop(request_id) is not None

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(EngineDeadError("this AsyncLLM has been shut down"))
        await self._client.close()

    async def _read(self) -> None:
        try:
            async for outputs in self._client.outputs():
                await self._take(outputs)
            self._fail(EngineDeadError("the engine has ended"))
        except DiptychError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineError(f"reading the engine's results failed: {error!r}"))

    async def _take(self, outputs: EngineCoreOutputs) -> None:
        stopped = []
        for state, delta in self._outputs.process(outputs):
            if delta.should_abort:
                stopped.append(state.request_id)
            call = self._calls.get(state.request_id)
            if call is not None and (delta.token_ids or state.finished):
                call.changed.set()
        if stopped:
            await self._client.abort(stopped)

    def _fail(self, error: DiptychError) -> None:
        self._failure = error
        for call in self._calls.values():
            call.failure = error
            call.changed.set()


class _Call:
    """The reader's side of one request: iterate for its outputs, leave the block to release it."""

    def __init__(self, engine: _RunningEngine, state: RequestState) -> None:
        self.state = state
        self.changed = asyncio.Event()
        self.failure: DiptychError | None = None
        self._engine = engine
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.release(self.state.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self.changed.wait()
        self.changed.clear()
        if self.failure is not None and not self.state.finished:
            raise self.failure
        if self.state.finish_reason is FinishReason.ERROR:
            raise EngineError(self.state.error or "the engine failed")
        self._ended = self.state.finished
        return self.state.output()
