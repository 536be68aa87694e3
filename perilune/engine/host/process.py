"""The client whose engine is another process: what goes wrong there, down to a crash in native code, stays there."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from perilune.engine.client import ModelInfo
from perilune.engine.host.child import EngineChild, describe_exit
from perilune.engine.host.loop import Phase, unavailable
from perilune.engine.host.streams import Streams
from perilune.engine.host.wire import (
    Abort,
    Ended,
    EngineSpec,
    Health,
    Inspect,
    Inspected,
    Outputs,
    Ready,
    Refused,
    Stop,
    Submit,
)
from perilune.engine.policy.gate import Gate
from perilune.engine.request import GenerateRequest, RequestOutput
from perilune.engine.stats import EngineStats
from perilune.errors import PeriluneError

_LOG = logging.getLogger(__name__)
# an engine that dies again so soon after it was restarted stays down
RESTART_WINDOW_S = 600.0
_LAST_STEP_S = 60.0
# a process that says nothing for so many times the longest step is frozen; a step that takes so many times longer hangs
SILENT_TIMEOUTS, HANGING_TIMEOUTS = 2.0, 4.0
_GUARD_S = 1.0


class ProcessClient:
    """Runs an engine in a process of its own, from the making of this client to `stop`.

    When that process dies, the running requests end with an error that says how, new ones are refused with status
    503, and another is started; when that one dies within `restart_window_s`, it stays down and `check_health` says
    why. A process that says nothing for as long as a step may take is not healthy either; for twice as long, or in a
    step that takes five times as long as it may, it is killed, and dealt with as one that died. The constructor blocks
    until the engine is made and raises what kept it from being made.
    """

    def __init__(
        self,
        spec: EngineSpec,
        name: str,
        *,
        restart_window_s: float = RESTART_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
        guard_s: float = _GUARD_S,
    ):
        self._guard_s = guard_s
        self._complained_s: float | None = None
        self._spec = spec
        self._restart_window_s = restart_window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._inspections: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._phase = Phase.NEW
        self._failure: str | None = None
        self._complaint: str | None = None
        self._stats, self._earlier = EngineStats(), EngineStats()
        self._num_restarts = 0
        self._child = EngineChild(spec)
        self._name, self._created = name, int(time.time())
        ready = self._child.wait_until_ready()
        self._heard_s = clock()
        self._streams = Streams(self.abort, _gate(ready))
        self._accept(ready)
        self._thread = threading.Thread(target=self._supervise, name="perilune-engine-reader", daemon=True)
        self._is_ending = threading.Event()
        self._guard = threading.Thread(target=self._kill_what_hangs, name="perilune-engine-guard", daemon=True)

    @property
    def pid(self) -> int:
        """The process of the engine, for whoever watches its memory."""
        return self._child.pid

    def start(self) -> None:
        assert self._phase is Phase.NEW, self._phase.value
        self._phase = Phase.RUNNING
        self._thread.start()
        self._guard.start()

    def stop(self, timeout_s: float) -> None:
        self._is_ending.set()
        with self._lock:
            was_new, self._phase = self._phase is Phase.NEW, Phase.DRAINING
            child = self._child
        child.send(Stop(timeout_s))
        if was_new:
            child.join(timeout_s + _LAST_STEP_S)
            child.close()
        elif self._failure is None:
            self._thread.join(timeout_s + _LAST_STEP_S)
            child.kill()
            self._thread.join()
        else:
            # one that is being made anew has nothing to finish
            child.kill()
            self._thread.join()
        self._phase = Phase.STOPPED

    def check_health(self) -> str | None:
        if self._phase is not Phase.RUNNING:
            return self._phase.value
        silent_s = self._clock() - self._heard_s
        if self._failure is None and silent_s > self._spec.step_timeout_s:
            return f"the engine process has said nothing for {silent_s:.0f} s"
        return self._failure or self._complaint

    def stats(self) -> EngineStats:
        num_rejected = self._streams.num_rejected
        stats = self._stats.behind(self._earlier)
        return replace(stats, num_restarts_total=self._num_restarts, num_rejected_total=num_rejected)

    async def inspect(self) -> dict[str, Any]:
        self._refuse_unless_running()
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        self._inspections[number] = answer
        self._child.send(Inspect(number))
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._inspections.pop(number, None)

    def abort(self, request_id: str) -> None:
        self._child.send(Abort(request_id))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._refuse_unless_running()
        self._check(request)
        self._streams.check_room()
        return self._outputs(request)

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        with self._lock:
            # under the lock, so that the end of a child finds every stream whose request it was given
            self._refuse_unless_running()
            stream = self._streams.open(request)
            self._child.send(Submit(request))
        async with aclosing(self._streams.read(stream)) as outputs:
            async for output in outputs:
                yield output

    def _refuse_unless_running(self) -> None:
        reason = self.check_health()
        if reason is not None:
            raise unavailable(reason)

    def _accept(self, ready: Ready) -> None:
        limits = ready.check.limits
        self._check = ready.check
        self.model = ModelInfo(
            name=self._name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            created=self._created,
            media=ready.media,
        )

    def _kill_what_hangs(self) -> None:
        """End a child of which nothing is to be hoped any more, so that another takes its place."""
        while not self._is_ending.wait(self._guard_s):
            reason = self._hopeless()
            if reason is not None and self._phase is Phase.RUNNING and self._failure is None:
                _LOG.error("the engine process is killed: %s", reason)
                self._heard_s, self._complained_s = self._clock(), None
                self._child.kill()

    def _hopeless(self) -> str | None:
        now_s, limit_s = self._clock(), self._spec.step_timeout_s
        if now_s - self._heard_s > SILENT_TIMEOUTS * limit_s:
            return f"it has said nothing for {now_s - self._heard_s:.0f} s"
        complained_s = self._complained_s
        if complained_s is not None and now_s - complained_s > HANGING_TIMEOUTS * limit_s:
            return f"its step does not end: {now_s - complained_s + limit_s:.0f} s"
        return None

    def _supervise(self) -> None:
        try:
            self._run()
        except Exception as error:
            _LOG.exception("what the engine says cannot be understood")
            self._child.kill()
            self._child.join(None)
            self._lose(f"the engine is lost: {type(error).__name__}: {error}")

    def _run(self) -> None:
        """Read what children say, and replace the first that dies."""
        died_s: float | None = None
        while True:
            reason = self._read_to_the_end()
            if self._phase is not Phase.RUNNING:
                self._lose(Phase.STOPPED.value)
                return
            now_s = self._clock()
            is_again = died_s is not None and now_s - died_s <= self._restart_window_s
            died_s = now_s
            if is_again:
                window = f"{self._restart_window_s / 60:g} minutes"
                self._lose(f"{reason}, for the second time within {window}, and stays down: restart the server")
                return
            self._lose(f"{reason} and is being restarted")
            if not self._restart(reason):
                return

    def _restart(self, reason: str) -> bool:
        """Make another child; False when that fails."""
        try:
            with self._lock:
                if self._phase is not Phase.RUNNING:
                    return False
                self._child = EngineChild(self._spec)
            ready = self._child.wait_until_ready()
        except PeriluneError as error:
            _LOG.error("the engine could not be restarted: %s", error)
            self._failure = f"{reason}, and could not be restarted: {error}"
            self._child.close()
            return False
        self._streams.use_gate(_gate(ready))
        self._accept(ready)
        self._num_restarts += 1
        self._heard_s = self._clock()
        self._earlier = self._stats.behind(self._earlier)
        self._stats, self._complaint, self._complained_s, self._failure = EngineStats(), None, None, None
        _LOG.warning("the engine was restarted")
        return True

    def _lose(self, reason: str) -> None:
        """Refuse what comes from now on, and end what runs."""
        with self._lock:
            self._failure = reason
        if self._phase is Phase.RUNNING:
            _LOG.error("%s; %d requests are lost", reason, len(self._streams))
        self._streams.end_all(reason)
        for answer in list(self._inspections.values()):
            if answer.set_running_or_notify_cancel():
                answer.set_exception(unavailable(reason))

    def _read_to_the_end(self) -> str:
        """Hand on what the child says until it ends; gives how it did."""
        child, last_words = self._child, None
        while (message := child.pipe.receive()) is not None:
            self._heard_s = self._clock()
            match message:
                case Outputs(outputs, turn, stats):
                    self._stats = self._stats if stats is None else stats
                    self._streams.deliver(outputs, turn)
                case Refused(request_id, error, was_taken):
                    self._streams.refuse(request_id, error, was_taken=was_taken)
                case Inspected(number, holdings):
                    answer = self._inspections.get(number)
                    if answer is not None and answer.set_running_or_notify_cancel():
                        answer.set_result(holdings)
                case Health(complaint):
                    self._complaint = complaint
                    self._complained_s = None if complaint is None else self._clock()
                case Ended(reason):
                    last_words = reason
        code = child.join(_LAST_STEP_S)
        child.close()
        return last_words or f"the engine process {describe_exit(code)}"


def _gate(ready: Ready) -> Gate:
    limits = ready.check.limits
    return Gate(limits.max_num_seqs, limits.max_waiting)
