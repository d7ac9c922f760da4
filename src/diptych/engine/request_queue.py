"""The requests that wait for the batch, in the order in which they may enter it."""

from __future__ import annotations

import heapq

from diptych.engine.scheduler_request import SchedulerRequest

# Lower goes first; the arrival number is unique, so that no two requests compare equal.
OrderKey = tuple[int, int]


def order_key(policy: str, request: SchedulerRequest) -> OrderKey:
    """Place of a request under `fcfs` (arrival) or `priority` (lower first, ties by arrival)."""
    return (request.priority if policy == "priority" else 0, request.arrival)


class RequestQueue:
    """A priority queue; a preempted request returns to the place that its key gives it."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._requests: dict[str, SchedulerRequest] = {}
        self._heap: list[tuple[OrderKey, str]] = []
        self.num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def push(self, request: SchedulerRequest) -> None:
        self._requests[request.request_id] = request
        self.num_pending_tokens += request.num_pending_prompt_tokens
        heapq.heappush(self._heap, (order_key(self._policy, request), request.request_id))

    def peek(self) -> SchedulerRequest:
        """The first request. The caller knows that the queue is not empty."""
        while True:
            key, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and order_key(self._policy, request) == key:
                return request
            heapq.heappop(self._heap)  # removed before its turn

    def pop(self) -> SchedulerRequest:
        request = self.peek()
        heapq.heappop(self._heap)
        self.remove(request.request_id)
        return request

    def remove(self, request_id: str) -> SchedulerRequest:
        """Take a request out from anywhere in the queue."""
        request = self._requests.pop(request_id)
        self.num_pending_tokens -= request.num_pending_prompt_tokens
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [
                (order_key(self._policy, waiting), name) for name, waiting in self._requests.items()
            ]
            heapq.heapify(self._heap)
        return request
