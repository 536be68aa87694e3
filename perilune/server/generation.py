"""The engine requests behind one API request: started together, merged into one stream, and never left behind.

Whoever opens a `FanOut` owns it; leaving it, for whatever reason, ends every engine request that is still running.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from perilune.engine.client import EngineClient
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput
from perilune.errors import RequestError
from perilune.server.operations.log_format import CURRENT_REQUEST_ID

LOG = logging.getLogger(__name__)
T = TypeVar("T")

Arrival = tuple[int, RequestOutput] | Exception


class FanOut:
    """Runs engine requests side by side; iterating gives (index of the request, output) as outputs come.

    The iteration ends when every request has finished and raises as soon as one of them fails.
    """

    def __init__(self, client: EngineClient, requests: Sequence[GenerateRequest], live: "set[FanOut]"):
        self._client = client
        self._requests = requests
        self._last: dict[int, RequestOutput] = {}
        self._live = live
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._num_open = len(requests)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        # every request is checked by the engine before the first one runs
        streams = [self._client.generate(request) for request in self._requests]
        self._live.add(self)
        self._tasks = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.discard(self)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        LOG.info("generated", extra=self._summary())

    def _summary(self) -> dict[str, object]:
        """The counts of what was generated, also of requests that were left."""
        outputs = self._last.values()
        reasons = [output.finish_reason.value for output in outputs if output.finish_reason is not None]
        return {
            "ids": ",".join(request.request_id for request in self._requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in self._requests),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "output_tokens": sum(output.num_output_tokens for output in outputs),
            "finished": ",".join(reasons + ["left"] * (len(self._requests) - len(reasons))),
        }

    def interrupt(self, error: Exception) -> None:
        """Make the iteration raise `error` next."""
        self._arrivals.put_nowait(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._num_open == 0:
            raise StopAsyncIteration
        arrival = await self._arrivals.get()
        if isinstance(arrival, Exception):
            raise arrival
        self._num_open -= arrival[1].is_finished
        return arrival

    async def _pump(self, index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    self._last[index] = output
                    self._arrivals.put_nowait(_failure(output) or (index, output))
        except Exception as error:
            self._arrivals.put_nowait(error)


class Dispatcher:
    """Opens the engine requests of API requests and knows which are live, so that a shutdown can end them."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._live: set[FanOut] = set()

    def open(self, requests: Sequence[GenerateRequest]) -> FanOut:
        """Requests ready to run; what the engine refuses is raised on entering the result."""
        log_id = CURRENT_REQUEST_ID.get()
        return FanOut(self._client, [replace(request, log_id=log_id) for request in requests], self._live)

    def interrupt_all(self, reason: str) -> None:
        """End every answer in progress with an error that says why."""
        for fan_out in tuple(self._live):
            fan_out.interrupt(RequestError(reason, status=503, code="server_interrupted"))


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, with ClientDisconnect raised, as soon as the client goes away.

    The body of the request must have been read: a server tells of a disconnect only after it.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failure(output: RequestOutput) -> Exception | None:
    if output.finish_reason is FinishReason.ERROR:
        return RequestError(output.error or "the engine failed", status=500, code="generation_failed")
    if output.finish_reason is FinishReason.TIMEOUT:
        return RequestError(output.error or "the request took too long", status=408, code="timeout")
    if output.finish_reason is FinishReason.ABORT:
        return RequestError("the server stopped this request", status=503, code="server_interrupted")
    return None
