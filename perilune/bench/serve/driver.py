"""Plays conversations against a server and notes when each token came."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from perilune.bench.serve.transport import RequestFailure, Transport
from perilune.bench.serve.workload import Session, Turn

# what the driver itself is late by is sampled so often
LAG_INTERVAL_S = 0.02


class Clock(Protocol):
    """Seconds that pass; a test lets them pass as it likes."""

    def now_s(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The seconds of this machine."""

    def now_s(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class Record:
    """One request: when it was sent, when each event with tokens came, and what it was; times are the clock's.

    `turn` counts from 0 within the conversation; `error` is the kind of failure, None for an answer that is whole.
    """

    turn: int
    sent_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.arrivals_s[-1] - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


@dataclass(frozen=True)
class Played:
    """What came of a load: its requests in the order they were sent, its length, and how the driver itself fared.

    `num_abandoned` requests were never sent because a turn before them failed. `lags_s` are how late timers were,
    `cpu_s` the processor seconds of this process.
    """

    records: tuple[Record, ...]
    duration_s: float
    num_abandoned: int
    max_concurrent: int
    lags_s: tuple[float, ...]
    cpu_s: float


class Driver:
    """Sends conversations; at most `concurrency` are open at once (None: no bound)."""

    def __init__(
        self,
        transport: Transport,
        *,
        concurrency: int | None,
        clock: Clock | None = None,
        on_request: Callable[[], None] = lambda: None,
    ):
        self._transport = transport
        self._clock = clock or WallClock()
        self._room = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._on_request = on_request
        self._records: list[Record] = []
        self._lags_s: list[float] = []
        self._num_open = self._max_open = self._num_abandoned = 0

    async def play(self, sessions: Sequence[Session]) -> Played:
        """Play all conversations to their ends. A driver plays once."""
        cpu_s, start_s = time.process_time(), self._clock.now_s()
        watching = asyncio.create_task(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as tasks:
                for session in sessions:
                    tasks.create_task(self._run(session, start_s))
        finally:
            watching.cancel()
        return Played(
            records=tuple(self._records),
            duration_s=self._clock.now_s() - start_s,
            num_abandoned=self._num_abandoned,
            max_concurrent=self._max_open,
            lags_s=tuple(self._lags_s),
            cpu_s=time.process_time() - cpu_s,
        )

    async def _run(self, session: Session, start_s: float) -> None:
        if session.start_s is not None:
            await self._clock.sleep(max(0.0, start_s + session.start_s - self._clock.now_s()))
        if self._room is None:
            await self._converse(session)
        else:
            async with self._room:
                await self._converse(session)

    async def _converse(self, session: Session) -> None:
        context: list[int] = []
        for index, turn in enumerate(session.turns):
            if turn.pause_s:
                await self._clock.sleep(turn.pause_s)
            context += turn.token_ids
            record = await self._request(index, turn, context)
            self._on_request()
            if record.error is not None:
                self._num_abandoned += len(session.turns) - index - 1
                return
            context += record.token_ids

    async def _request(self, index: int, turn: Turn, context: Sequence[int]) -> Record:
        record = Record(turn=index, sent_s=self._clock.now_s(), num_prompt_tokens=len(context))
        self._records.append(record)
        self._num_open += 1
        self._max_open = max(self._max_open, self._num_open)
        try:
            async with aclosing(self._transport.complete(context, turn.max_tokens)) as increments:
                async for increment in increments:
                    if increment.token_ids:
                        record.arrivals_s.append(self._clock.now_s())
                        record.token_ids += increment.token_ids
                    if increment.num_prompt_tokens is not None:
                        record.num_prompt_tokens = increment.num_prompt_tokens
                        record.num_cached_tokens = increment.num_cached_tokens
            if record.num_output_tokens != turn.max_tokens:
                record.error = "no tokens" if not record.token_ids else "fewer tokens than asked for"
        except RequestFailure as failure:
            record.error = failure.kind
        finally:
            self._num_open -= 1
        return record

    async def _watch_lag(self) -> None:
        while True:
            due_s = self._clock.now_s() + LAG_INTERVAL_S
            await self._clock.sleep(LAG_INTERVAL_S)
            self._lags_s.append(max(0.0, self._clock.now_s() - due_s))
