"""The thread that owns a core: takes commands, runs steps, hands out what comes of them, and is watched meanwhile.

It sleeps on a condition variable while there is nothing to do.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from perilune.engine.core import EngineCore
from perilune.engine.host.streams import Turn
from perilune.engine.host.watchdog import Watchdog
from perilune.engine.request import GenerateRequest, RequestOutput
from perilune.engine.stats import EngineStats
from perilune.errors import RequestError
from perilune.grammar.matcher import GrammarState

_LOG = logging.getLogger(__name__)
_LAST_STEP_S = 60.0
# what the cache holds may take so long to be written to disk at the end
_SAVING_S = 30.0
DEFAULT_STEP_TIMEOUT_S = 300.0


class Sink(Protocol):
    """Where the news of an engine go; called from the engine's thread."""

    def deliver(self, outputs: Sequence[RequestOutput], turn: Turn) -> None: ...

    def refuse(self, request_id: str, error: Exception) -> None:
        """A request was not taken."""

    def end_all(self, reason: str) -> None:
        """The engine is over, and requests that have not ended never will."""


class Phase(Enum):
    """Where an engine stands; the value is what clients are told."""

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


@dataclass(frozen=True)
class _Inspect:
    answer: "Future[dict[str, Any]]"


class EngineLoop:
    """Runs an engine core in a thread of its own, from `start` to `stop`; every method may be called from any thread.

    An error in that thread, which is a fault of ours, ends the engine and makes `check_health` say why. So does, while
    it lasts, a step longer than `step_timeout_s`; `on_complaint` is told of it, and with None when it has ended.
    `on_look` is called every few seconds, in the middle of a step too.
    """

    def __init__(
        self,
        core: EngineCore,
        sink: Sink,
        *,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        on_complaint: Callable[[str | None], None] = lambda _: None,
        on_look: Callable[[], None] = lambda: None,
    ):
        self._core = core
        self._sink = sink
        self._condition = threading.Condition()
        self._inbox: deque[_Add | _Abort | _Inspect] = deque()
        self._phase = Phase.NEW
        self._failure: str | None = None
        self._stats = core.stats()
        self._step_began_s: float | None = None
        self._watchdog = Watchdog(
            step_timeout_s,
            lambda: self._step_began_s,
            lambda: core.running_log_ids,
            tell=on_complaint,
            on_look=on_look,
        )
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)

    def start(self) -> None:
        assert self._phase is Phase.NEW, self._phase.value
        self._phase = Phase.RUNNING
        self._thread.start()
        self._watchdog.start()

    def stop(self, timeout_s: float) -> None:
        """Let running requests finish for `timeout_s`, abort the rest, and end. Blocks."""
        if self._thread.is_alive():
            self._move_to(Phase.DRAINING)
            self._thread.join(timeout_s)
            self._move_to(Phase.CANCELLING)
            self._thread.join(_LAST_STEP_S)
        if self._thread.is_alive():
            _LOG.error("the engine thread is stuck in a step and is left behind")
        self._watchdog.stop()

    @property
    def is_idle(self) -> bool:
        """Whether the latest step left nothing to do."""
        return not self._core.has_work

    def check_health(self) -> str | None:
        """None while requests can be served, else the reason why not."""
        if self._failure is not None:
            return self._failure
        return self._watchdog.complaint if self._phase is Phase.RUNNING else self._phase.value

    def refuse_unless_running(self) -> None:
        """Raise RequestError with status 503 unless requests can be served."""
        reason = self.check_health()
        if reason is not None:
            raise unavailable(reason)

    def stats(self) -> EngineStats:
        return self._stats

    def submit(self, request: GenerateRequest, grammar: GrammarState | None) -> None:
        """Queue a request; raises as `refuse_unless_running` does, later refusals go to the sink."""
        with self._condition:
            self.refuse_unless_running()
            self._inbox.append(_Add(request, grammar))
            self._condition.notify()

    def abort(self, request_id: str) -> None:
        self._put(_Abort(request_id))

    def inspect(self) -> "Future[dict[str, Any]]":
        """What the core holds, between two steps; RequestError with status 503 where there is no engine."""
        self.refuse_unless_running()
        answer: Future[dict[str, Any]] = Future()
        self._put(_Inspect(answer))
        return answer

    def _put(self, command: _Abort | _Inspect) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    def _move_to(self, phase: Phase) -> None:
        with self._condition:
            if self._phase is not Phase.STOPPED:
                self._phase = phase
                self._condition.notify()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            _LOG.exception("the engine thread died")
            self._failure = f"the engine died: {type(error).__name__}: {error}"
        self._core.close(_SAVING_S if self._failure is None else 0.0)
        with self._condition:
            self._phase = Phase.STOPPED
            left = list(self._inbox)
        for command in left:
            if isinstance(command, _Inspect):
                command.answer.set_exception(unavailable(self.check_health() or self._phase.value))
        self._sink.end_all(self._failure or Phase.STOPPED.value)

    def _turn(self) -> bool:
        """Take what has come in, run one step, hand out the results; False at the end of the engine."""
        core = self._core
        if not core.has_work:
            core.check_integrity()
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or core.has_work or self._phase is not Phase.RUNNING)
            commands, phase = list(self._inbox), self._phase
            self._inbox.clear()
        self._step_began_s = time.monotonic()
        outputs = [output for command in commands if (output := self._apply(command)) is not None]
        if phase is Phase.CANCELLING:
            aborted = [core.abort(request_id) for request_id in core.live_request_ids]
            outputs += [output for output in aborted if output is not None]
        has_ended = phase is not Phase.RUNNING and not core.has_work
        outputs += core.step()
        self._step_began_s = None
        self._stats = stats = core.stats()
        num_taken = sum(isinstance(command, _Add) for command in commands)
        turn = Turn(num_taken, stats.num_running, stats.num_waiting, num_started=stats.queue_time_s.count)
        self._sink.deliver(outputs, turn)
        return not has_ended

    def _apply(self, command: _Add | _Abort | _Inspect) -> RequestOutput | None:
        if isinstance(command, _Abort):
            return self._core.abort(command.request_id)
        if isinstance(command, _Inspect):
            command.answer.set_result(self._core.inspect())
            return None
        try:
            self._core.add(command.request, command.grammar)
        except Exception as error:
            self._sink.refuse(command.request.request_id, error)
        return None


def unavailable(reason: str) -> RequestError:
    """What is told to whoever asks an engine that cannot serve."""
    return RequestError(f"{reason}; try again later", status=503, code="engine_unavailable")
