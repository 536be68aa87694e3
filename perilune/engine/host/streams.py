"""From outputs to those who wait for them: one stream per request, each on the event loop of its reader."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from perilune.engine.policy.gate import Gate
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput
from perilune.errors import RequestError

Arrival = RequestOutput | Exception


@dataclass(frozen=True)
class Turn:
    """What an engine has after a turn, in which it took `num_taken` requests; `num_started` ever left the queue."""

    num_taken: int
    num_running: int
    num_waiting: int
    num_started: int


@dataclass(eq=False)
class Stream:
    """Where the outputs of a request go; kept until the engine has ended the request, also when nobody reads on."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    arrivals: asyncio.Queue[Arrival]
    is_closed: bool = False


class Streams:
    """The open streams. Outputs may be delivered from any thread; those of one step reach each loop in one wake-up.

    `abort` is called for a request whose reader has gone. `gate` says how many may wait.
    """

    def __init__(self, abort: Callable[[str], None], gate: Gate):
        self._abort = abort
        self._gate = gate
        self._lock = threading.Lock()
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    @property
    def num_rejected(self) -> int:
        """How many requests found the queue full."""
        return self._gate.num_rejected

    def use_gate(self, gate: Gate) -> None:
        """Count from the beginning, for another engine."""
        with self._lock:
            self._gate = gate

    def check_room(self) -> None:
        """RequestError, status 429, when the queue is full."""
        with self._lock:
            self._gate.check()

    def open(self, request: GenerateRequest) -> Stream:
        """A stream on the running event loop; RequestError for an id that is in use, and when the queue is full."""
        stream = Stream(request, asyncio.get_running_loop(), asyncio.Queue())
        with self._lock:
            if request.request_id in self._open:
                raise RequestError(f"a request with id {request.request_id!r} is running", param="request_id")
            self._gate.enter()
            self._open[request.request_id] = stream
        return stream

    def forget(self, stream: Stream) -> None:
        """Take back a stream whose request never reached the engine."""
        with self._lock:
            if self._open.get(stream.request.request_id) is stream:
                del self._open[stream.request.request_id]

    async def read(self, stream: Stream) -> AsyncGenerator[RequestOutput, None]:
        """The outputs up to the last one; leaving aborts the request, unless it has ended."""
        try:
            while True:
                arrival = await stream.arrivals.get()
                if isinstance(arrival, Exception):
                    raise arrival
                yield arrival
                if arrival.is_finished:
                    return
        finally:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        request_id = stream.request.request_id
        with self._lock:
            if self._open.get(request_id) is not stream:
                return
            stream.is_closed = True
        self._abort(request_id)

    def deliver(self, outputs: Iterable[RequestOutput], turn: Turn) -> None:
        """Give the outputs of a turn to their streams; those nobody reads are dropped."""
        with self._lock:
            self._gate.on_turn(**asdict(turn))
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        found: list[tuple[Stream, Arrival]] = []
        with self._lock:
            for output in outputs:
                stream = self._open.get(output.request_id)
                if stream is None:
                    continue
                if output.is_finished:
                    del self._open[output.request_id]
                if not stream.is_closed:
                    found.append((stream, output))
        self._put(found)

    def refuse(self, request_id: str, error: Exception, *, was_taken: bool = True) -> None:
        """End a stream with an exception; `was_taken` says that a turn counts, or counted, its request."""
        with self._lock:
            if not was_taken:
                self._gate.take_back()
            stream = self._open.pop(request_id, None)
        if stream is not None and not stream.is_closed:
            self._put([(stream, error)])

    def end_all(self, reason: str) -> None:
        """End every stream with an output of reason error."""
        with self._lock:
            requests = [stream.request for stream in self._open.values()]
        self._deliver(lost_output(request, reason) for request in requests)

    def _put(self, arrivals: Sequence[tuple[Stream, Arrival]]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Stream, Arrival]]] = defaultdict(list)
        for stream, arrival in arrivals:
            by_loop[stream.loop].append((stream, arrival))
        for loop, those in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, those)
            except RuntimeError:  # the loop is closed: its streams will never be read
                for stream, _ in those:
                    self._close(stream)


def _put_all(arrivals: Sequence[tuple[Stream, Arrival]]) -> None:
    for stream, arrival in arrivals:
        stream.arrivals.put_nowait(arrival)


def lost_output(request: GenerateRequest, error: str) -> RequestOutput:
    """The last output of a request that the engine can say no more about."""
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
