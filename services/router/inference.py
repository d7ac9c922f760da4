"""One prompt to one stream of text: what the HTTP gateway and the gRPC front share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from diptych.clock import Clock
from diptych.errors import CapacityError, DiptychError, UnavailableError
from diptych.observe import Status
from diptych.sampling_params import SamplingParams
from diptych.services.router.dispatch import Dispatcher
from diptych.services.router.membership import Members
from diptych.services.router.metrics import RouterMetrics
from diptych.services.router.prompts import ChatPrompt, Prompt, TextPrompt
from diptych.services.router.routable import Role
from diptych.text.output_processor import OutputDelta, RequestState
from diptych.text.processor import ProcessedRequest, Processor

_TOKENISER_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One prompt with all that decides its answer. `timeout_s` None: the router's own. `tenant` is
    the name of the API key: whose quota in the KV store is charged."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    timeout_s: float | None = None


class Generation(NamedTuple):
    """A call under way: what is known of it so far, and its news, one by one."""

    state: RequestState
    deltas: AsyncIterator[OutputDelta]


class Inference:
    """Admits, tokenises, dispatches and detokenises."""

    def __init__(
        self,
        *,
        processor: Processor,
        dispatcher: Dispatcher,
        members: Members,
        metrics: RouterMetrics,
        clock: Clock,
        max_in_flight: int,
        timeout_s: float,
    ) -> None:
        self.processor = processor
        self._most_model_len = processor.max_model_len
        self._dispatcher = dispatcher
        self._members = members
        self._metrics = metrics
        self._clock = clock
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(_TOKENISER_THREADS, "tokenise")

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output, in tokens; None while no worker is ready."""
        of_workers = self._members.max_model_len
        return None if of_workers is None else min(of_workers, self._most_model_len)

    def readiness(self) -> Status:
        """Ready with one complete path: prefill and decode, or an aggregated worker."""
        count = self._members.count()
        if count[Role.AGGREGATED] or (count[Role.PREFILL] and count[Role.DECODE]):
            return Status(True)
        have = ", ".join(f"{role.name.lower()} {count[role]}" for role in Role if role)
        missing = [r.name.lower() for r in (Role.PREFILL, Role.DECODE) if not count[r]]
        return Status(False, f"no {' and no '.join(missing)} worker is ready ({have})")

    def check_capacity(self, num_prompts: int) -> None:
        """Refuse at the door what would not fit.

        Raises:
            CapacityError: too many requests are under way.
        """
        if self._num_in_flight + num_prompts > self._max_in_flight:
            raise CapacityError(
                f"{self._num_in_flight} requests are under way, {self._max_in_flight} are allowed; "
                "try again later"
            )

    @asynccontextmanager
    async def generate(self, call: GenerationCall) -> AsyncIterator[Generation]:
        """Run a call. Leaving the block before the end cancels it on every worker.

        Raises:
            DiptychError: any of the tree, here or from the iterator.
        """
        self.check_capacity(1)
        self._num_in_flight += 1
        self._idle.clear()
        self._metrics.num_running.inc()
        started = self._clock.monotonic()
        try:
            request = await self._process(call)
            state = RequestState(call.request_id, request, self.processor.tokenizer)
            async with aclosing(self._deltas(call, request, state, started)) as deltas:
                yield Generation(state, deltas)
        except DiptychError as error:
            self._metrics.errors.labels(type(error).__name__).inc()
            raise
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()
            self._metrics.num_running.dec()

    async def wait_idle(self, timeout_s: float) -> int:
        """Wait until no request is under way, at most so long; returns how many are."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._num_in_flight

    async def close(self) -> None:
        """Stop the tokeniser threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _process(self, call: GenerationCall) -> ProcessedRequest:
        """Render, tokenise and check, off the event loop."""
        max_model_len = self.max_model_len
        if max_model_len is None:
            raise UnavailableError("no worker is ready")
        self.processor.max_model_len = max_model_len
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, process_prompt, self.processor, call.prompt, call.sampling
        )

    async def _deltas(
        self,
        call: GenerationCall,
        request: ProcessedRequest,
        state: RequestState,
        started: float,
    ) -> AsyncGenerator[OutputDelta, None]:
        timeout_s = min(call.timeout_s or self._timeout_s, self._timeout_s)
        engine_request = request.to_engine(
            call.request_id,
            priority=call.priority,
            arrival_time_s=self._clock.unix(),
            cache_salt=call.cache_salt,
            tenant=call.tenant,
        )
        last = started
        deadline, vocab_size = started + timeout_s, self.processor.vocab_size
        async with self._dispatcher.run(engine_request, deadline, vocab_size=vocab_size) as tokens:
            async for released in tokens:
                now = self._clock.monotonic()
                self._observe_output(state, len(released.token_ids), now - last)
                last = now
                delta = state.update(
                    released.first_position,
                    released.token_ids,
                    finish_reason=released.finish_reason,
                    stop_token_id=-1 if released.stop_token_id is None else released.stop_token_id,
                    num_cached_tokens=released.num_cached_tokens,
                    logprobs=released.logprobs,
                    prompt_logprobs=released.prompt_logprobs,
                )
                if delta.finished:
                    self._observe_end(state, now - started)
                yield delta
                if delta.finished:
                    return

    def _observe_output(self, state: RequestState, num_tokens: int, gap_s: float) -> None:
        if not num_tokens:
            return
        if state.token_ids:
            self._metrics.inter_token_latency.observe(gap_s)
        else:
            self._metrics.time_to_first_token.observe(gap_s)

    def _observe_end(self, state: RequestState, took_s: float) -> None:
        num_prompt, num_output = len(state.request.prompt_token_ids), len(state.token_ids)
        self._metrics.e2e_latency.observe(took_s)
        self._metrics.prompt_tokens_hist.observe(num_prompt)
        self._metrics.generation_tokens_hist.observe(num_output)
        self._metrics.prompt_tokens.inc(num_prompt)
        self._metrics.generation_tokens.inc(num_output)
        self._metrics.cached_tokens.inc(state.num_cached_tokens)
        self._metrics.ended(str(state.finish_reason))


def process_prompt(
    processor: Processor, prompt: Prompt, sampling: SamplingParams
) -> ProcessedRequest:
    """Render, tokenise and check one prompt in any of its forms; raises as `Processor` does."""
    if isinstance(prompt, ChatPrompt):
        return processor.chat(
            prompt.messages,
            sampling,
            add_generation_prompt=prompt.add_generation_prompt,
            **prompt.template_variables,
        )
    if isinstance(prompt, TextPrompt):
        return processor.completion(
            prompt.text, sampling, add_special_tokens=prompt.add_special_tokens
        )
    return processor.completion(prompt.token_ids, sampling)
