"""The engine process: makes an engine as it is told, and runs it until told to stop or until its server is gone."""

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from perilune.engine.host.loop import EngineLoop
from perilune.engine.host.streams import Turn
from perilune.engine.host.wire import (
    Abort,
    Alive,
    Ended,
    EngineSpec,
    Failed,
    Health,
    Inspect,
    Inspected,
    Outputs,
    Pipe,
    Ready,
    Refused,
    Stop,
    Submit,
)
from perilune.engine.request import GenerateRequest, RequestOutput
from perilune.errors import PeriluneError, RequestError
from perilune.grammar.compiler import NotQuick
from perilune.grammar.lanes import CompileLanes
from perilune.grammar.matcher import GrammarState

STATS_INTERVAL_S = 0.1
EXIT_OK, EXIT_CANNOT_START, EXIT_ORPHAN, EXIT_DIED = 0, 2, 3, 70
_LOG = logging.getLogger(__name__)


class Inbox:
    """Reads the pipe from a thread of its own, so that the end of the server ends this process whatever it does."""

    def __init__(self, pipe: Pipe):
        self._pipe = pipe
        self._messages: SimpleQueue[object] = SimpleQueue()
        Thread(target=self._read, name="perilune-inbox", daemon=True).start()

    def take(self) -> object:
        """The next message; blocks."""
        return self._messages.get()

    def _read(self) -> None:
        try:
            while (message := self._pipe.receive()) is not None:
                self._messages.put(message)
        except Exception:
            _LOG.exception("a message of the server cannot be read")
        # threads may be anywhere in native code, so nothing is taken apart
        os._exit(EXIT_ORPHAN)


class Worker:
    """An engine behind a pipe. What the engine says goes into the pipe from its own thread, one message a step."""

    def __init__(self, pipe: Pipe, inbox: Inbox, spec: EngineSpec):
        from perilune.engine.build import build_engine
        from perilune.ops.threads import set_num_threads

        if spec.num_threads is not None:
            set_num_threads(spec.num_threads)
        self._pipe = pipe
        self._inbox = inbox
        self._core = build_engine(spec.checkpoint, spec.config)
        self._engine = EngineLoop(
            self._core,
            self,
            step_timeout_s=spec.step_timeout_s,
            on_complaint=lambda text: pipe.send(Health(text)),
            on_look=lambda: pipe.send(Alive()),
        )
        self._grammars = CompileLanes()
        # grammars in work, and which of their requests were ended meanwhile
        self._lock = Lock()
        self._is_aborted: dict[str, bool] = {}
        self._stats_sent_s = 0.0
        self._is_stopping = False

    def run(self) -> None:
        """Serve the pipe; ends the process."""
        self._pipe.send(Ready(self._core.check_request, self._core.limits.media))
        self._engine.start()
        self._grammars.start(self._core.warm_up)
        while True:
            self._apply(self._inbox.take())

    def _apply(self, message: object) -> None:
        match message:
            case Submit(request) if request.grammar is not None:
                with self._lock:
                    self._is_aborted[request.request_id] = False
                self._grammars.submit(partial(self._compile, request))
            case Submit(request):
                self._submit(request, None)
            case Abort(request_id):
                with self._lock:
                    if request_id in self._is_aborted:
                        self._is_aborted[request_id] = True
                        return
                self._engine.abort(request_id)
            case Inspect(number):
                self._inspect(number)
            case Stop(timeout_s):
                self._is_stopping = True
                Thread(target=self._stop, args=(timeout_s,), name="perilune-stop").start()
            case _:
                raise AssertionError(f"{message} is no message for an engine")

    def _compile(self, request: GenerateRequest, is_quick: bool) -> None:
        grammar: GrammarState | None = None
        refusal: Exception | None = None
        try:
            grammar = self._core.compile(request, is_quick=is_quick)
        except NotQuick:
            raise
        except Exception as error:
            refusal = error
        with self._lock:
            # under the lock, so that an abort finds the request in one place or the other
            if self._is_aborted.pop(request.request_id):
                refusal = RequestError("the request was ended before it began", status=503, code="server_interrupted")
            if refusal is None:
                self._submit(request, grammar)
        if refusal is not None:
            self.refuse(request.request_id, refusal, was_taken=False)

    def _submit(self, request: GenerateRequest, grammar: GrammarState | None) -> None:
        try:
            self._engine.submit(request, grammar)
        except RequestError as error:
            self.refuse(request.request_id, error, was_taken=False)

    def _inspect(self, number: int) -> None:
        def answer(found: "Future[dict[str, Any]]") -> None:
            # the end of the engine is told in other words
            if found.exception() is None:
                self._pipe.send(Inspected(number, found.result()))

        try:
            self._engine.inspect().add_done_callback(answer)
        except RequestError:
            # the server knows from the health why there is no answer
            return

    def _stop(self, timeout_s: float) -> None:
        self._grammars.stop()
        self._engine.stop(timeout_s)
        logging.shutdown()
        os._exit(EXIT_OK)

    def deliver(self, outputs: Sequence[RequestOutput], turn: Turn) -> None:
        now_s = time.monotonic()
        stats = None
        if self._engine.is_idle or now_s - self._stats_sent_s > STATS_INTERVAL_S:
            stats, self._stats_sent_s = self._engine.stats(), now_s
        if outputs or stats is not None or turn.num_taken:
            self._pipe.send(Outputs(tuple(outputs), turn, stats))

    def refuse(self, request_id: str, error: Exception, *, was_taken: bool = True) -> None:
        self._pipe.send(Refused(request_id, error, was_taken))

    def end_all(self, reason: str) -> None:
        if not self._is_stopping:
            self._pipe.send(Ended(reason))
            logging.shutdown()
            os._exit(EXIT_DIED)


def main(descriptor: int) -> None:
    """Run the engine process whose end of the pipe is `descriptor`. Signals are for the server, which then says so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # a crash in native code says where, before the server says that
    faulthandler.enable()
    pipe = Pipe(descriptor)
    inbox = Inbox(pipe)
    spec = inbox.take()
    assert isinstance(spec, EngineSpec)
    spec.prepare()
    try:
        worker = Worker(pipe, inbox, spec)
    except PeriluneError as error:
        pipe.send(Failed(error))
        sys.exit(EXIT_CANNOT_START)
    worker.run()
