"""How everything above reaches an engine: one protocol, and the client whose engine is a thread of this process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from perilune.config.media import MediaConfig
from perilune.engine.core import EngineCore
from perilune.engine.host.loop import DEFAULT_STEP_TIMEOUT_S, EngineLoop
from perilune.engine.host.streams import Streams
from perilune.engine.policy.gate import Gate
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprob
from perilune.engine.stats import EngineStats, HistogramData
from perilune.grammar.lanes import CompileLanes

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

    async def inspect(self) -> dict[str, Any]:
        """What the engine holds for whom, as JSON values; RequestError with status 503 where it cannot say."""

    def check_health(self) -> str | None:
        """None while requests can be served, else the reason why not."""


class InProcessClient:
    """Runs an engine core in a thread of this process, from `start` to `stop`.

    An error in that thread, which is a fault of ours, ends every stream with reason error and makes
    `check_health` say why; a step longer than `step_timeout_s` does the latter while it lasts.
    """

    def __init__(self, core: EngineCore, model: ModelInfo, *, step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S):
        self.model = model
        self._core = core
        self._streams = Streams(self.abort, Gate(core.limits.max_num_seqs, core.limits.max_waiting))
        self._engine = EngineLoop(core, self._streams, step_timeout_s=step_timeout_s)
        self._grammars = CompileLanes()

    def start(self) -> None:
        self._engine.start()
        self._grammars.start(self._core.warm_up)

    def stop(self, timeout_s: float) -> None:
        self._grammars.stop()
        self._engine.stop(timeout_s)

    def check_health(self) -> str | None:
        return self._engine.check_health()

    def stats(self) -> EngineStats:
        return replace(self._engine.stats(), num_rejected_total=self._streams.num_rejected)

    async def inspect(self) -> dict[str, Any]:
        return await asyncio.wrap_future(self._engine.inspect())

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        self._engine.refuse_unless_running()
        self._core.check(request)
        self._streams.check_room()
        return self._outputs(request)

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        grammar = None
        if request.grammar is not None:
            grammar = await self._grammars.run(lambda is_quick: self._core.compile(request, is_quick=is_quick))
        self._engine.refuse_unless_running()
        stream = self._streams.open(request)
        try:
            self._engine.submit(request, grammar)
        except BaseException:
            self._streams.forget(stream)
            raise
        async with aclosing(self._streams.read(stream)) as outputs:
            async for output in outputs:
                yield output
