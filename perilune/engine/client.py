"""How everything above reaches an engine: one protocol, and the client whose engine is a thread of this process.

The engine thread sleeps on a condition variable while there is nothing to do. The results of one step reach each event
loop in one wake-up.
"""

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from perilune.config.media import MediaConfig
from perilune.engine.core import EngineCore
from perilune.engine.policy.gate import Gate
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprob
from perilune.engine.stats import EngineStats, HistogramData
from perilune.errors import RequestError
from perilune.grammar.lanes import CompileLanes
from perilune.grammar.matcher import GrammarState

__all__ = [
    "EngineClient",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "HistogramData",
    "InProcessClient",
    "ModelInfo",
    "RequestOutput",
    "TokenLogprob",
]

_LOG = logging.getLogger(__name__)
_LAST_STEP_S = 60.0


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the served model; `created` is a Unix time in seconds.

    `media` says how pictures are prepared; None for a model that sees none.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int
    media: MediaConfig | None = None


class EngineClient(Protocol):
    """An engine as its users see it. Every method may be called from any thread."""

    @property
    def model(self) -> ModelInfo: ...

    def start(self) -> None:
        """Begin to serve; called once."""

    def stop(self, timeout_s: float) -> None:
        """Refuse new requests, let the running ones finish for `timeout_s`, abort the rest, and end. Blocks."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, up to and with the one that has a finish reason.

        What can never be served raises RequestError or CapacityError from this call itself, and so does a full queue;
        a grammar that cannot be compiled, or a queue that filled meanwhile, does when the first output is awaited. Then
        the request is submitted; closing the generator, or cancelling the task that waits in it, aborts the request,
        which is free within one step.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with reason abort. An unknown id is ignored."""

    def stats(self) -> EngineStats:
        """The counters as they were after the latest step."""

    def check_health(self) -> str | None:
        """None while requests can be served, else the reason why not."""


class _Phase(Enum):
    NEW = "the engine is not started"
    RUNNING = "the engine is running"
    DRAINING = "the engine is shutting down"
    CANCELLING = "the engine is shutting down at once"
    STOPPED = "the engine is stopped"


@dataclass(frozen=True)
class _Add:
    request: GenerateRequest
    grammar: GrammarState | None


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(eq=False)
class _Stream:
    """Where the outputs of a request go; kept until the engine has ended the request, also when nobody reads on."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput]
    is_closed: bool = False


class InProcessClient:
    """Runs an engine core in a thread of its own, from `start` to `stop`.

    An error in that thread, which is a fault of ours, ends every stream with reason error and makes
    `check_health` say why.
    """

    def __init__(self, core: EngineCore, model: ModelInfo):
        self.model = model
        self._core = core
        self._condition = threading.Condition()
        self._inbox: deque[_Add | _Abort] = deque()
        self._streams: dict[str, _Stream] = {}
        self._phase = _Phase.NEW
        self._failure: str | None = None
        self._stats = core.stats()
        self._gate = Gate(core.limits.max_num_seqs, core.limits.max_waiting)
        self._grammars = CompileLanes()
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)

    def start(self) -> None:
        assert self._phase is _Phase.NEW, self._phase.value
        self._phase = _Phase.RUNNING
        self._thread.start()
        self._grammars.start(self._core.warm_up)

    def stop(self, timeout_s: float) -> None:
        self._grammars.stop()
        if not self._thread.is_alive():
            return
        self._move_to(_Phase.DRAINING)
        self._thread.join(timeout_s)
        self._move_to(_Phase.CANCELLING)
        self._thread.join(_LAST_STEP_S)
        if self._thread.is_alive():
            _LOG.error("the engine thread is stuck in a step and is left behind")

    def check_health(self) -> str | None:
        if self._failure is not None:
            return self._failure
        return None if self._phase is _Phase.RUNNING else self._phase.value

    def stats(self) -> EngineStats:
        return replace(self._stats, num_rejected_total=self._gate.num_rejected)

    def abort(self, request_id: str) -> None:
        with self._condition:
            self._inbox.append(_Abort(request_id))
            self._condition.notify()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._refuse_unless_running()
        self._core.check(request)
        with self._condition:
            self._gate.check()
        return self._outputs(request)

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        stream = _Stream(request, loop, asyncio.Queue())
        grammar = None
        if request.grammar is not None:
            grammar = await self._grammars.run(lambda is_quick: self._core.compile(request, is_quick=is_quick))
        self._submit(stream, grammar)
        try:
            while True:
                output = await stream.outputs.get()
                yield output
                if output.is_finished:
                    return
        finally:
            self._close(stream)

    def _submit(self, stream: _Stream, grammar: GrammarState | None) -> None:
        request_id = stream.request.request_id
        with self._condition:
            self._refuse_unless_running()
            if request_id in self._streams:
                raise RequestError(f"a request with id {request_id!r} is running", param="request_id")
            self._gate.enter()
            self._streams[request_id] = stream
            self._inbox.append(_Add(stream.request, grammar))
            self._condition.notify()

    def _close(self, stream: _Stream) -> None:
        """Abort the request of a stream that nobody reads any more, unless it has ended."""
        request_id = stream.request.request_id
        with self._condition:
            if self._streams.get(request_id) is stream:
                stream.is_closed = True
                self._inbox.append(_Abort(request_id))
                self._condition.notify()

    def _refuse_unless_running(self) -> None:
        reason = self.check_health()
        if reason is not None:
            raise RequestError(f"{reason}; try again later", status=503, code="engine_unavailable")

    def _move_to(self, phase: _Phase) -> None:
        with self._condition:
            if self._phase is not _Phase.STOPPED:
                self._phase = phase
                self._condition.notify()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            _LOG.exception("the engine thread died")
            self._failure = f"the engine died: {type(error).__name__}: {error}"
        with self._condition:
            self._phase = _Phase.STOPPED
            orphans = list(self._streams.values())
        reason = self._failure or _Phase.STOPPED.value
        self._deliver(_orphan_output(stream.request, reason) for stream in orphans)

    def _turn(self) -> bool:
        """Take what has come in, run one step, hand out the results; False at the end of the engine."""
        core = self._core
        if not core.has_work:
            core.check_integrity()
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or core.has_work or self._phase is not _Phase.RUNNING)
            commands, phase = list(self._inbox), self._phase
            self._inbox.clear()
        outputs = [output for command in commands if (output := self._apply(command)) is not None]
        if phase is _Phase.CANCELLING:
            aborted = [core.abort(request_id) for request_id in core.live_request_ids]
            outputs += [output for output in aborted if output is not None]
        has_ended = phase is not _Phase.RUNNING and not core.has_work
        outputs += core.step()
        self._stats = stats = core.stats()
        with self._condition:
            self._gate.on_turn(
                num_taken=sum(isinstance(command, _Add) for command in commands),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_started=stats.queue_time_s.count,
            )
        self._deliver(outputs)
        return not has_ended

    def _apply(self, command: _Add | _Abort) -> RequestOutput | None:
        if isinstance(command, _Abort):
            return self._core.abort(command.request_id)
        try:
            self._core.add(command.request, command.grammar)
        except Exception as error:
            return _orphan_output(command.request, str(error))
        return None

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Give outputs to their streams, with one wake-up per event loop; those nobody reads are dropped."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        with self._condition:
            for output in outputs:
                stream = self._streams[output.request_id]
                if output.is_finished:
                    del self._streams[output.request_id]
                if not stream.is_closed:
                    by_loop[stream.loop].append((stream, output))
        for loop, arrivals in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, arrivals)
            except RuntimeError:  # the loop is closed: its streams will never be read
                for stream, _ in arrivals:
                    self._close(stream)


def _put_all(arrivals: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in arrivals:
        stream.outputs.put_nowait(output)


def _orphan_output(request: GenerateRequest, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=FinishReason.ERROR,
        stop_reason=None,
        error=error,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
    )
