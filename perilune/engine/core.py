"""The engine proper: takes requests, runs steps, decides when a request ends, and says what happened.

One thread owns a core. It never waits: whoever calls `step` decides when. It knows no tensors; the runner does.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from perilune.cache.manager import CacheManager
from perilune.cache.tiers.ledger import Carry
from perilune.cache.tiers.store import TierStats
from perilune.config.engine import LLGUIDANCE
from perilune.engine.batch import ScheduledBatch, ScheduledSequence, StepResult
from perilune.engine.policy.budget import StepBudget
from perilune.engine.policy.check import CoreLimits as CoreLimits
from perilune.engine.policy.check import RequestCheck
from perilune.engine.policy.deadlines import Deadlines
from perilune.engine.request import (
    FinishReason,
    GenerateRequest,
    ImageInput,
    Request,
    RequestOutput,
    RequestStatus,
)
from perilune.engine.scheduler import Scheduler
from perilune.engine.stats import DraftStats, EngineStats, StatsRecorder
from perilune.errors import RequestError
from perilune.grammar.compiler import GrammarCompiler
from perilune.grammar.matcher import GrammarState
from perilune.sampling.logprobs import SampledToken
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

# Between two steps pictures are worked on for as long as a step takes, within these bounds.
LEAST_EMBEDDING_S, MOST_EMBEDDING_S = 0.02, 0.5
# Of a bound on the time between tokens, pictures may take this share.
EMBEDDING_SHARE = 0.25
MOST_SHOWN_STATES = 100
# How long a step that has nothing to compute waits for a load; requests that come meanwhile wait as long.
LOAD_WAIT_S = 0.005


class Runner(Protocol):
    """What the core needs of a model runner."""

    def execute(self, batch: ScheduledBatch) -> StepResult: ...

    def erase_blocks(self, block_ids: Sequence[int]) -> None: ...

    def is_sound(self, slot: int) -> bool: ...

    def settle(self) -> None: ...


class Tiers(Protocol):
    """What the core needs of whatever carries the cache's contents to other memory and back."""

    def ended(self, wait_s: float) -> Sequence[tuple[int, bool]]: ...

    def stats(self) -> tuple[TierStats, ...]: ...

    def close(self, latest: Iterable[Carry], within_s: float) -> None: ...


class Drafting(Protocol):
    """What the core needs of whatever guesses tokens that a step verifies."""

    @property
    def num_drafts(self) -> int: ...

    @property
    def has_guesses(self) -> bool: ...

    def rests(self) -> bool: ...

    def lengths(self, requests: Sequence[Request], most: Sequence[int], budget: int) -> Sequence[int]: ...

    def keep(self, taken: Mapping[str, Sequence[int]]) -> None: ...

    def force(self) -> None: ...

    def stats(self) -> DraftStats: ...


class Pictures(Protocol):
    """What the core needs of whatever embeds pictures."""

    def is_embedded(self, image: ImageInput) -> bool: ...

    def embed(self, awaited: Sequence[ImageInput], budget_s: float) -> None: ...


@dataclass
class _Live:
    request: Request
    text: TextStream | None


@dataclass
class _News:
    """What a step means for a request: tokens in order, and whether and why it ends, or fails, with the last."""

    tokens: list[SampledToken] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [sampled.token_id for sampled in self.tokens]


class EngineCore:
    """Requests in, outputs out, one step at a time. Without a tokenizer, stop strings and grammars are
    refused.

    A request that fails (logits that are not finite, a grammar that leads nowhere, an error in its own text) ends
    alone with reason error. An exception of the runner ends the requests of that step; the core goes on.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        limits: CoreLimits,
        tokenizer: Tokenizer | None,
        *,
        images: Pictures | None = None,
        tiers: Tiers | None = None,
        drafting: Drafting | None = None,
        grammar_backend: str = LLGUIDANCE,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.limits = limits
        self.tokenizer = tokenizer
        self.check_request = RequestCheck(limits, cache.capacity_tokens, has_tokenizer=tokenizer is not None)
        self._compiler = None if tokenizer is None else GrammarCompiler(tokenizer, limits.vocab_size, grammar_backend)
        self._runner = runner
        self._cache = cache
        self._scheduler = Scheduler(
            cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prompt_grain=limits.prompt_grain,
            num_drafts=0 if drafting is None else drafting.num_drafts,
            is_embedded=images.is_embedded if images is not None else lambda _: True,
            is_sound=runner.is_sound,
        )
        self._images = images
        self._tiers = tiers
        self._drafting = drafting
        self._budget = None
        if limits.max_itl_s is not None:
            self._budget = StepBudget(limits.max_itl_s, limits.max_num_batched_tokens)
        self._step_s = 0.0
        self._last_end_s: float | None = None
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._deadlines = Deadlines()
        self._num_added = 0
        self._recorder = StatsRecorder()

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self._cache.num_loads > 0

    @property
    def live_request_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    @property
    def running_log_ids(self) -> list[str]:
        """The ids, as their clients know them, of the requests that a step may compute for."""
        requests = (entry.request for entry in tuple(self._live.values()))
        return [_log_id(request) for request in requests if request.status is RequestStatus.RUNNING]

    def inspect(self) -> dict[str, Any]:
        """What is held, and by whom, as JSON values; of the states that are kept the ones used last."""
        tiers = () if self._tiers is None else self._tiers.stats()
        return {
            "usage": asdict(self._cache.usage),
            "requests": [self._holding(x.request) for x in self._live.values()],
            "kept_states": [asdict(state) for state in self._cache.kept_states(MOST_SHOWN_STATES)],
            "tiers": [asdict(tier) for tier in tiers],
        }

    def _holding(self, request: Request) -> dict[str, Any]:
        is_running = request.status is RequestStatus.RUNNING
        return {
            "id": request.request_id,
            "log_id": _log_id(request),
            "status": request.status.value,
            "num_tokens": request.num_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_blocks": len(self._cache.block_table(request.request_id)) if is_running else 0,
            "slot": self._cache.state_slot(request.request_id) if is_running else None,
        }

    def check(self, message: GenerateRequest) -> None:
        """Raise RequestError or CapacityError for what can never be served; safe to call from any thread."""
        self.check_request(message)

    def warm_up(self) -> None:
        """Prepare what the first constrained request would otherwise wait for; safe to call from any thread."""
        if self._compiler is not None:
            self._compiler.warm_up()

    def force_guesses(self) -> None:
        """Have every step verify as many guesses as there is room for: shows how often they are right."""
        if self._drafting is not None:
            self._drafting.force()

    def compile(self, message: GenerateRequest, *, is_quick: bool = False) -> GrammarState | None:
        """The grammar of a request, ready to be followed; safe to call from any thread.

        Raises RequestError, naming the field, for a grammar that is wrong or too large. May take a second; with
        `is_quick` it raises NotQuick where it would.
        """
        if message.grammar is None:
            return None
        if self._compiler is None:
            raise RequestError("a grammar needs a tokenizer and this engine has none", param="response_format")
        return self._compiler.compile(message.grammar, is_quick=is_quick)

    def add(self, message: GenerateRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request with its grammar, which is compiled here if it has not been.

        Raises as `check` and `compile` do, and RequestError for an id that is in use.
        """
        self.check(message)
        if message.request_id in self._live:
            raise RequestError(f"a request with id {message.request_id!r} is running", param="request_id")
        params = message.params
        request = Request(
            message=message,
            arrival_index=self._num_added,
            arrival_s=self._clock(),
            max_total_tokens=self.check_request.max_total_tokens(message),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            grammar=self.compile(message) if grammar is None else grammar,
        )
        text = None
        if params.stop:
            assert self.tokenizer is not None
            text = TextStream(self.tokenizer, message.start_channel, params.stop)
        self._num_added += 1
        self._live[message.request_id] = _Live(request, text)
        if message.timeout_s is not None:
            self._deadlines.add(message.request_id, request.arrival_s + message.timeout_s)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds; its last output, or None when there is no such request."""
        live = self._live.get(request_id)
        return None if live is None else self._finish(live.request, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one step, and work on the pictures that requests wait for; returns the news of every request."""
        began_s = self._clock()
        outputs = [*self._end_late(began_s), *self._embed_images()]
        embedding_s = self._clock() - began_s
        limit = None if self._budget is None else partial(self._budget.prompt_tokens, spent_s=embedding_s)
        self._take_loads(0.0)
        drafting = None if self._drafting is None or self._drafting.rests() else self._drafting
        batch = self._scheduler.schedule(limit, None if drafting is None else drafting.lengths)
        outputs += self._run_batch(batch)
        self._observe(batch, began_s, embedding_s)
        return outputs

    def _end_late(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose time is over."""
        late = [self._live[request_id].request for request_id in self._deadlines.passed(now_s)]
        return [
            self._finish(
                request,
                FinishReason.TIMEOUT,
                error=f"the request took longer than its timeout of {request.message.timeout_s:g} s; it had "
                f"{request.num_output_tokens} tokens of its answer",
            )
            for request in late
        ]

    def _observe(self, batch: ScheduledBatch, began_s: float, embedding_s: float) -> None:
        """Tell the budget what a step took, and what went by between it and the one before, but for its pictures."""
        ended_s = self._clock()
        if self._budget is not None and batch.sequences:
            since_s = began_s if self._last_end_s is None else self._last_end_s
            num_prompt_tokens = batch.num_scheduled_tokens - batch.num_decodes
            self._budget.observe(num_prompt_tokens, batch.num_decodes, ended_s - since_s - embedding_s)
        self._last_end_s = ended_s if self._live else None

    def _take_loads(self, wait_s: float) -> None:
        if self._tiers is not None and self._cache.num_loads:
            self._scheduler.end_loads(self._tiers.ended(wait_s))

    def _embed_images(self) -> list[RequestOutput]:
        awaited = self._scheduler.awaited_images
        if self._images is None or not awaited:
            return []
        try:
            self._images.embed(awaited, self._embedding_budget_s)
        except Exception as error:
            showing = self._showing({image.digest for image in awaited})
            _LOG.exception("embedding pictures failed", extra=_log_ids(showing))
            reason = f"a picture could not be embedded ({type(error).__name__}); the log of the engine says where"
            return [self._fail(request, reason) for request in showing]
        return []

    @property
    def _embedding_budget_s(self) -> float:
        budget_s = min(max(self._step_s, LEAST_EMBEDDING_S), MOST_EMBEDDING_S)
        return budget_s if self.limits.max_itl_s is None else min(budget_s, self.limits.max_itl_s * EMBEDDING_SHARE)

    def _showing(self, digests: Set[bytes]) -> list[Request]:
        """The running requests with any of these pictures."""
        live = (entry.request for entry in self._live.values())
        running = (request for request in live if request.status is RequestStatus.RUNNING)
        return [x for x in running if any(image.digest in digests for image in x.message.images)]

    def _run_batch(self, batch: ScheduledBatch) -> list[RequestOutput]:
        if not batch.has_work:
            if not self._scheduler.awaited_images:
                self._take_loads(LOAD_WAIT_S)
            return []
        began_s = self._clock()
        self._recorder.on_step(batch, began_s)
        try:
            result = self._runner.execute(batch)
            news = {item.request.request_id: self._take(item, result) for item in batch.sequences}
            if self._drafting is not None:
                taken = {name: found.token_ids for name, found in news.items()} if self._drafting.has_guesses else {}
                self._drafting.keep(taken)
        except Exception as error:
            requests = [sequence.request for sequence in batch.sequences]
            _LOG.exception("a step of %d requests failed", len(requests), extra=_log_ids(requests))
            reason = f"a step of the engine failed ({type(error).__name__}); its log says where"
            return [self._fail(sequence.request, reason) for sequence in batch.sequences]
        self._step_s = self._clock() - began_s
        outputs = [self._commit(sequence, news[sequence.request.request_id]) for sequence in batch.sequences]
        return [output for output in outputs if output is not None]

    def stats(self) -> EngineStats:
        return self._recorder.snapshot(
            self._cache.usage,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            tiers=() if self._tiers is None else self._tiers.stats(),
            drafts=None if self._drafting is None else self._drafting.stats(),
        )

    def check_integrity(self) -> None:
        """Assert that the cache's accounts add up, and that nothing is held when there is no request."""
        self._cache.check_integrity()
        usage = self._cache.usage
        assert self.has_work or usage.blocks_used == usage.slots_used == 0, f"{usage} is held by no request"

    def close(self, within_s: float) -> None:
        """Have what the cache and its tiers hold written to disk, where that is asked for; the core's last call."""
        if self._tiers is not None:
            self._runner.settle()
            self._tiers.close(self._cache.snapshots(), within_s)

    def _take(self, sequence: ScheduledSequence, result: StepResult) -> _News:
        """Give a request the tokens that the step yielded for it, up to the one that ends it."""
        request, news = sequence.request, _News()
        news.error = result.failures.get(request.request_id)
        if news.error is not None:
            return news
        request.prompt_logprobs.extend(result.prompt_logprobs.get(request.request_id, ()))
        for sampled in result.tokens[request.request_id] if sequence.needs_token else ():
            news.tokens.append(sampled)
            self._take_token(request, sampled.token_id, news)
            if news.reason is not None or news.error is not None:
                break
        return news

    def _take_token(self, request: Request, token_id: int, news: _News) -> None:
        request.token_ids.append(token_id)
        self._recorder.on_token(request, self._clock())
        if request.grammar is not None:
            request.grammar.advance(token_id)
            if request.grammar.error is not None:
                news.error = f"the grammar failed: {request.grammar.error}"
                return
        try:
            news.reason, news.stop_reason = self._end(request, token_id)
        except Exception as error:
            _LOG.exception("the text of request %s failed", request.request_id, extra=_log_ids([request]))
            news.error = f"the text failed: {type(error).__name__}: {error}"

    def _commit(self, sequence: ScheduledSequence, news: _News) -> RequestOutput | None:
        """Count what the step has computed for a request, and end it where it ends."""
        request = sequence.request
        if news.error is not None:
            return self._fail(request, news.error, news.tokens[:-1])
        # the token behind the last that is known, and behind each guess that was right
        request.num_computed_tokens = sequence.seq_len + max(0, len(news.tokens) - 1)
        self._cache.commit(request.request_id, request.num_computed_tokens)
        if news.reason is not None:
            return self._finish(request, news.reason, news.tokens, stop_reason=news.stop_reason)
        return _output(request, news.tokens) if news.tokens else None

    def _end(self, request: Request, token_id: int) -> tuple[FinishReason | None, int | str | None]:
        """Whether the request ends with this token, and through what."""
        params = request.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in self.limits.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        text = self._live[request.request_id].text
        if text is not None:
            text.push([token_id])
            if text.stopped is not None:
                return FinishReason.STOP, text.stopped
        return (FinishReason.LENGTH if request.num_tokens >= request.max_total_tokens else None), None

    def _fail(self, request: Request, error: str, tokens: Sequence[SampledToken] = ()) -> RequestOutput:
        """End a running request whose cached rows cannot be trusted."""
        self._runner.erase_blocks(self._scheduler.fail(request))
        return self._end_live(request, FinishReason.ERROR, tokens, error=error)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        tokens: Sequence[SampledToken] = (),
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        self._scheduler.finish(request)
        return self._end_live(request, reason, tokens, stop_reason=stop_reason, error=error)

    def _end_live(
        self,
        request: Request,
        reason: FinishReason,
        tokens: Sequence[SampledToken] = (),
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        del self._live[request.request_id]
        self._deadlines.remove(request.request_id)
        self._recorder.on_finish(request, reason, self._clock())
        return _output(request, tokens, reason=reason, stop_reason=stop_reason, error=error)


def _log_ids(requests: Sequence[Request]) -> dict[str, str]:
    """What a log line needs to be found under every request it is about."""
    return {"request_id": " ".join(_log_id(request) for request in requests)}


def _log_id(request: Request) -> str:
    return request.message.log_id or request.request_id


def _output(
    request: Request,
    tokens: Sequence[SampledToken],
    *,
    reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
    error: str | None = None,
) -> RequestOutput:
    logprobs = tuple(sampled.logprob for sampled in tokens if sampled.logprob is not None)
    is_first = len(tokens) > 0 and request.num_output_tokens == len(tokens)
    has_prompt_logprobs = is_first and request.params.prompt_logprobs is not None
    return RequestOutput(
        request_id=request.request_id,
        token_ids=tuple(sampled.token_id for sampled in tokens),
        logprobs=logprobs or None,
        prompt_logprobs=tuple(request.prompt_logprobs) if has_prompt_logprobs else None,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=error,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
    )
