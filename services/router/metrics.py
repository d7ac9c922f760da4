"""What the router counts. Names are those of the field where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diptych.services.router.routable import Role

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_GAP = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.0125, 0.015, 0.0175,
    0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class RouterMetrics:
    """The metrics of one router, in a registry of its own."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        count_workers: Callable[[], Mapping[Role, int]],
    ) -> None:
        self.registry = registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], registry=registry, buckets=buckets)
            return metric.labels(model_name)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "From acceptance to the first token.", _TTFT
        )
        self.inter_token_latency = histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of a request.", _TOKEN
        )
        self.e2e_latency = histogram(
            "vllm:e2e_request_latency_seconds", "From acceptance to the last token.", _REQUEST
        )
        self.prompt_tokens_hist = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.generation_tokens_hist = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS
        )
        self.num_running: Gauge = Gauge(
            "vllm:num_requests_running",
            "Requests under way in this router.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self.prompt_tokens: Counter = counter(
            "vllm:prompt_tokens", "Prompt tokens of answered requests.", "model_name"
        ).labels(model_name)
        self.generation_tokens: Counter = counter(
            "vllm:generation_tokens", "Output tokens sent.", "model_name"
        ).labels(model_name)
        self.cached_tokens: Counter = counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in a prefix cache.", "model_name"
        ).labels(model_name)
        self._success = counter(
            "vllm:request_success", "Requests that ended.", "model_name", "finished_reason"
        )
        self.errors = counter(
            "diptych:request_errors", "Requests that ended in an error, by its class.", "error"
        )
        self.http_responses = counter(
            "diptych:http_responses", "HTTP responses of the API, by status.", "status"
        )
        self.attempts = counter(
            "diptych:attempts", "Submissions that a worker accepted, by stage.", "stage"
        )
        self.attempts_failed = counter(
            "diptych:attempts_failed", "Attempts that were lost or refused, by stage.", "stage"
        )
        self.handoffs_declined = counter(
            "diptych:handoffs_declined",
            "Requests whose KV did not go from memory to memory though `handoff` wants it, by why.",
            "reason",
        )
        self.handoffs = counter(
            "diptych:handoffs",
            "Hand-offs as the router sees them, by way (direct, store) and result (done, failed).",
            "way",
            "result",
        )
        self.handoff_gap = Histogram(
            "diptych:handoff_gap_seconds",
            "From token 1, of prefill, to token 2, of another worker, by the way KV came.",
            ["way"],
            registry=registry,
            buckets=_GAP,
        )
        self.stale_entries = counter(
            "diptych:stale_entries", "Outputs of attempts that are past, dropped."
        )
        workers = Gauge(
            "diptych:workers_ready",
            "Workers that take requests, by role.",
            ["role"],
            registry=registry,
        )
        for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED):
            counted = partial(_count, count_workers, role)
            workers.labels(role.name.lower()).set_function(counted)
        self._model_name = model_name

    def ended(self, finished_reason: str) -> None:
        """Count one request that ended by itself."""
        self._success.labels(self._model_name, finished_reason).inc()


def _count(count_workers: Callable[[], Mapping[Role, int]], role: Role) -> float:
    return float(count_workers().get(role, 0))
