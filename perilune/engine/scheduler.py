"""Who runs in the next step, and with how many tokens.

There are no phases: a request has known tokens that the model has not seen, and a step computes some of them. Decodes
come first, then prompts, which share what is left of one budget of tokens. Imports no torch and keeps no clock.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from perilune.cache.manager import Admission, CacheManager
from perilune.cache.moves import Move
from perilune.engine.batch import ScheduledBatch, ScheduledSequence, Seal
from perilune.engine.policy.shares import Claim, share
from perilune.engine.request import ImageInput, Request, RequestStatus

# A waiting request that cannot run yet lets so many others of its priority pass, each shorter by this factor at least;
# so many of those that wait are looked at in a step.
MOST_OVERTAKEN = 32
OVERTAKER_RATIO = 4
LOOKAHEAD = 32
# Tokens that are computed once where requests with the same beginning come together.
WORTH_WAITING = 64


# Takes answers, the most guesses that each can use, and the most for all; gives those worth verifying of each.
DraftLengths = Callable[[Sequence[Request], Sequence[int], int], Sequence[int]]


def _order(request: Request) -> tuple[int, int]:
    return request.message.priority, request.arrival_index


class Scheduler:
    """Plans steps over waiting and running requests, and asks the cache manager for their room.

    Requests stand in order of priority, then of arrival. A request is admitted with blocks for all its known tokens, so
    only decodes need more later. When blocks run out, the last request gives up its room, keeps its tokens and waits to
    compute them again; the first request therefore always gets on. Prompts share a step as `share` says.

    Prompts are cut at multiples of `prompt_grain` tokens, where a model computes the same bits cut or whole, unless the
    budget is too small for that. A prompt is computed up to its first picture that `is_embedded` denies, and waits
    there while others go on.
    What a request leaves behind is kept for others, and for itself after a preemption, if `is_sound` says that the
    state in its slot may be.

    A request whose beginning lies in a tier waits while it is loaded, holding its room, and others go on; one that
    needs what is being loaded for another waits without room. After a load that failed a request computes. One whose
    beginning is being computed for another waits until its state is there, if that saves much.

    With `num_drafts`, answers may have so many guesses verified in a step, if all else leaves tokens and blocks for it.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prompt_grain: int = 1,
        num_drafts: int = 0,
        is_embedded: Callable[[ImageInput], bool] = lambda _: True,
        is_sound: Callable[[int], bool] = lambda _: True,
    ):
        assert max_num_batched_tokens >= max_num_seqs, "a step must have room for a token of every request"
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prompt_grain = prompt_grain
        self._num_drafts = num_drafts
        self._is_embedded = is_embedded
        self._is_sound = is_sound
        self._moves: list[Move] = []
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loading: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

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
        insort(self._waiting, request, key=_order)

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands, and free what it holds."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.status is RequestStatus.LOADING:
            self._loading.remove(request)
            self._cache.abandon(request.request_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def fail(self, request: Request) -> list[int]:
        """Forget a running request whose cached rows and state cannot be trusted, and what is kept of its tokens.

        Returns the blocks that must be erased before they are used again.
        """
        self._running.remove(request)
        request.status = RequestStatus.FINISHED
        return self._cache.discard(request.request_id)

    def _release(self, request: Request) -> None:
        """Free what a request holds, and keep its state if it is sound."""
        request_id, position = request.request_id, request.num_computed_tokens
        is_kept = self._cache.wants_state(request_id, position) and self._is_sound(self._cache.state_slot(request_id))
        self._cache.release(request_id, keep_state=position if is_kept else 0)

    def end_loads(self, ended: Iterable[tuple[int, bool]]) -> None:
        """Let requests run whose loads have succeeded, and wait again those whose loads have not; both by their ids."""
        for load_id, has_succeeded in ended:
            request_id, moves = self._cache.end_load(load_id, has_succeeded, self._is_sound)
            self._moves += moves
            for request in [request for request in self._loading if request.request_id == request_id]:
                self._loading.remove(request)
                if has_succeeded:
                    request.status = RequestStatus.RUNNING
                    insort(self._running, request, key=_order)
                else:
                    has_run = request.first_scheduled_s is not None
                    request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
                    request.num_computed_tokens, request.may_load = 0, False
                    insort(self._waiting, request, key=_order)

    def schedule(
        self, prompt_limit: Callable[[int], int] | None = None, draft_lengths: DraftLengths | None = None
    ) -> ScheduledBatch:
        """Plan one step; empty only when there is no request, or when all wait for pictures or loads.

        `prompt_limit` says, given how many sequences compute one token, how many prompt tokens the step may have, and
        `draft_lengths` how many guesses of each of these answers are worth verifying.
        """
        planned: list[tuple[Request, int]] = []
        num_preempted = self._plan_decodes(planned)
        budget = self._max_num_batched_tokens - len(planned)
        if prompt_limit is not None:
            budget = min(budget, prompt_limit(len(planned)))
        prompts = [request for request in self._running if request.num_pending_tokens > 1]
        if num_preempted == 0:
            self._admit(prompts, budget)
        counts = share(budget, [self._claim(request) for request in prompts], self._prompt_grain)
        drafts = {} if draft_lengths is None else self._plan_drafts(planned, draft_lengths, budget - sum(counts))
        planned += [(request, count) for request, count in zip(prompts, counts, strict=True) if count > 0]
        is_idle = not (self._waiting or self._running)
        assert planned or self.awaited_images or self._cache.num_loads or is_idle, "nothing can run"
        planned.sort(key=lambda item: (item[1] > 1, _order(item[0])))
        sequences = tuple(self._sequence(request, count, drafts.get(request, 0)) for request, count in planned)
        moves, self._moves = tuple(self._moves), []
        return ScheduledBatch(sequences, num_preempted, moves, self._cache.drain_transfers())

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

    def _plan_drafts(
        self, decodes: Sequence[tuple[Request, int]], lengths: DraftLengths, budget: int
    ) -> dict[Request, int]:
        """How many guesses each answer may have verified, with room in the cache for as many as are ever made."""
        answers = [request for request, _ in decodes if request.num_output_tokens > 0]
        most = [min(self._num_drafts, request.max_total_tokens - request.num_tokens - 1) for request in answers]
        planned: dict[Request, int] = {}
        for request, wanted in zip(answers, lengths(answers, most, budget), strict=True):
            if wanted > 0 and self._cache.extend(
                request.request_id, request.num_tokens + self._num_drafts, num_spare_blocks=self._num_admitted
            ):
                planned[request] = wanted
        return planned

    def _claim(self, request: Request) -> Claim:
        """What a prompt could compute: all, or what comes before the first picture that is not embedded.

        Where one that is embedded comes before that, it is not waited for the next: both may find no room at once.
        """
        ready, first, shows = request.num_pending_tokens, request.num_computed_tokens, False
        for image in request.message.images:
            if image.end <= first:
                continue
            if not self._is_embedded(image):
                before = max(0, image.start - first)
                aligned = max(0, image.start // self._prompt_grain * self._prompt_grain - first)
                ready = min(ready, aligned or (before if shows else 0))
                break
            shows = True
        return Claim(request.message.priority, request.num_pending_tokens, ready, first)

    def _admit(self, prompts: list[Request], budget: int) -> None:
        """Admit waiting requests in order, and into `prompts` what can run, while slots, blocks and budget last.

        One that gets no blocks, or no tokens beside the prompts that run, lets some short ones pass.
        """
        held_back: list[Request] = []
        for request in self._waiting[:LOOKAHEAD]:
            if budget <= 0 or self._num_admitted >= self._max_num_seqs:
                return
            if not _may_pass(request, held_back) or self._awaits(request, prompts):
                continue
            admission = self._ask_cache(request) if self._has_share(request, prompts, budget) else None
            if admission is None:
                held_back.append(request)
            elif not admission.is_deferred:
                self._enter(request, admission)
                if request.status is RequestStatus.RUNNING:
                    insort(prompts, request, key=_order)
                for passed in held_back:
                    passed.num_overtaken += 1
            if any(not _may_be_passed(passed) for passed in held_back):
                return

    def _awaits(self, request: Request, prompts: Sequence[Request]) -> bool:
        """Whether a prompt before this one is about to leave a state that saves it much: then it waits for that.

        Nothing is remembered: when the other ends, or gets there, the question is asked anew.
        """
        if request.params.prompt_logprobs is not None:
            return False
        chain = request.prefix_chain(self._cache.block_size)
        furthest = max(
            (
                position
                for other in prompts
                if _order(other) < _order(request)
                for position in other.seal_positions
                if other.num_computed_tokens < position < chain.num_tokens
                and other.prefix_chain(self._cache.block_size).key(position) == chain.key(position)
            ),
            default=0,
        )
        return furthest >= WORTH_WAITING and furthest - self._cache.num_kept_tokens(chain) >= WORTH_WAITING

    def _has_share(self, request: Request, prompts: Sequence[Request], budget: int) -> bool:
        """Whether a waiting request would compute something beside `prompts`, or would wait for its picture only."""
        together = sorted((*prompts, request), key=_order)
        claims, index = [self._claim(prompt) for prompt in together], together.index(request)
        return share(budget, claims, self._prompt_grain)[index] > 0 or claims[index].num_ready == 0

    @property
    def _num_admitted(self) -> int:
        return len(self._running) + len(self._loading)

    def _ask_cache(self, request: Request) -> Admission | None:
        """Room for a waiting request, if there is any.

        A block per admitted request stays free, so that a newcomer is not preempted at the next block boundary.
        """
        return self._cache.admit(
            request.request_id,
            request.prefix_chain(self._cache.block_size),
            num_spare_blocks=self._num_admitted,
            # the logits of a prompt's tokens are there only where they are computed
            takes_up=request.params.prompt_logprobs is None,
            loads=request.may_load,
            hints=request.message.branch_points,
        )

    def _enter(self, request: Request, admission: Admission) -> None:
        """Let a waiting request run, or wait for its load."""
        self._moves += admission.moves
        request.num_computed_tokens += admission.num_cached_tokens
        request.seal_positions = admission.seal_positions
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = admission.num_cached_tokens
        self._waiting.remove(request)
        is_loading = admission.load_id is not None
        request.status = RequestStatus.LOADING if is_loading else RequestStatus.RUNNING
        insort(self._loading if is_loading else self._running, request, key=_order)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_order)

    def _sequence(self, request: Request, count: int, most_drafts: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        return ScheduledSequence(
            request=request,
            num_computed_tokens=start,
            token_ids=tuple(request.token_ids[start : start + count]),
            block_table=self._cache.block_table(request.request_id),
            state_slot=self._cache.state_slot(request.request_id),
            needs_token=count == request.num_pending_tokens,
            logprob_targets=_logprob_targets(request, start + count),
            seals=self._seals(request, start, start + count),
            most_drafts=most_drafts,
        )

    def _seals(self, request: Request, start: int, end: int) -> tuple[Seal, ...]:
        """Where a step from `start` to `end` copies the state of a request."""
        positions = (position for position in request.seal_positions if start < position <= end)
        return tuple(Seal(position, self._cache.begin_seal(request.request_id, position)) for position in positions)


def _may_pass(request: Request, held_back: Sequence[Request]) -> bool:
    return all(
        request.message.priority == passed.message.priority
        and request.num_tokens * OVERTAKER_RATIO <= passed.num_tokens
        for passed in held_back
    )


def _may_be_passed(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.num_overtaken < MOST_OVERTAKEN


def _logprob_targets(request: Request, seq_len: int) -> range:
    """Positions of prompt tokens whose log-probabilities are wanted, not there yet, and known from this step on."""
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(len(request.prompt_logprobs), request.num_computed_tokens + 1)
    return range(first, min(request.num_prompt_tokens, seq_len + 1))
