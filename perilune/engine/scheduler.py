"""Who runs in the next step, and with how many tokens.

There are no phases: a request has known tokens that the model has not seen, and a step computes some of them. Decodes
come first, then prompts in order of arrival, within one budget of tokens. Imports no torch and keeps no clock.
"""

from bisect import insort
from collections.abc import Callable

from perilune.cache.manager import CacheManager
from perilune.engine.batch import ScheduledBatch, ScheduledSequence
from perilune.engine.request import ImageInput, Request, RequestStatus


def _arrival(request: Request) -> int:
    return request.arrival_index


class Scheduler:
    """Plans steps over waiting and running requests, and asks the cache manager for their room.

    A request is admitted with blocks for all its known tokens, so only decodes need more later. When blocks run out,
    the youngest request gives up its room, keeps its tokens and waits to compute them again; the oldest request
    therefore always gets on.

    A prompt is computed up to its first picture that `is_embedded` denies, and waits there while others go on.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_embedded: Callable[[ImageInput], bool] = lambda _: True,
    ):
        assert max_num_batched_tokens >= max_num_seqs, "a step must have room for a token of every request"
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._is_embedded = is_embedded
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def awaited_images(self) -> list[ImageInput]:
        """Pictures that running requests come to within a step and that are not embedded, oldest first."""
        return [
            image
            for request in self._running
            for image in request.message.images
            if image.start < request.num_computed_tokens + self._max_num_batched_tokens
            and image.end > request.num_computed_tokens
            and not self._is_embedded(image)
        ]

    def add(self, request: Request) -> None:
        """Queue a request, which must fit the cache when it is alone."""
        insort(self._waiting, request, key=_arrival)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free what it holds."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._cache.release(request.request_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def schedule(self) -> ScheduledBatch:
        """Plan one step; empty only when there is no request, or when all wait for pictures."""
        planned: list[tuple[Request, int]] = []
        num_preempted = self._plan_decodes(planned)
        budget = self._max_num_batched_tokens - len(planned)
        budget = self._plan_prompts(planned, budget)
        if num_preempted == 0:
            self._admit(planned, budget)
        assert planned or self.awaited_images or not (self._waiting or self._running), "nothing can run"
        planned.sort(key=lambda item: (item[1] > 1, item[0].arrival_index))
        return ScheduledBatch(tuple(self._sequence(request, count) for request, count in planned), num_preempted)

    def _plan_decodes(self, planned: list[tuple[Request, int]]) -> int:
        """Plan one token for each request that has one pending, oldest first; returns how many were preempted."""
        num_preempted = 0
        for request in [request for request in self._running if request.num_pending_tokens == 1]:
            while request.status is RequestStatus.RUNNING:
                if self._cache.extend(request.request_id, request.num_tokens):
                    planned.append((request, 1))
                    break
                self._preempt(self._running[-1])
                num_preempted += 1
        return num_preempted

    def _plan_prompts(self, planned: list[tuple[Request, int]], budget: int) -> int:
        for request in self._running:
            if budget > 0 and request.num_pending_tokens > 1:
                budget -= self._plan_prompt(request, planned, budget)
        return budget

    def _plan_prompt(self, request: Request, planned: list[tuple[Request, int]], budget: int) -> int:
        """Plan tokens of a prompt, up to the first picture that is not embedded; returns how many."""
        count, first = min(budget, request.num_pending_tokens), request.num_computed_tokens
        for image in request.message.images:
            if first < image.end and image.start < first + count and not self._is_embedded(image):
                count = max(0, image.start - first)
        if count > 0:
            planned.append((request, count))
        return count

    def _admit(self, planned: list[tuple[Request, int]], budget: int) -> None:
        """Admit waiting requests in order while slots, blocks and budget last.

        A block per running request stays free, so that a newcomer is not preempted at the next block boundary.
        """
        while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if not self._cache.admit(request.request_id, request.num_tokens, num_spare_blocks=len(self._running)):
                return
            self._waiting.pop(0)
            request.status = RequestStatus.RUNNING
            insort(self._running, request, key=_arrival)
            budget -= self._plan_prompt(request, planned, budget)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._cache.release(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_arrival)

    def _sequence(self, request: Request, count: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        return ScheduledSequence(
            request=request,
            num_computed_tokens=start,
            token_ids=tuple(request.token_ids[start : start + count]),
            block_table=self._cache.block_table(request.request_id),
            state_slot=self._cache.state_slot(request.request_id),
            needs_token=count == request.num_pending_tokens,
            logprob_targets=_logprob_targets(request, start + count),
        )


def _logprob_targets(request: Request, seq_len: int) -> range:
    """Positions of prompt tokens whose log-probabilities are wanted, not there yet, and known from this step on."""
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(len(request.prompt_logprobs), request.num_computed_tokens + 1)
    return range(first, min(request.num_prompt_tokens, seq_len + 1))
