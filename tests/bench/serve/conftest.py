"""Time that passes only when everybody waits, and a server that answers by a script."""

import asyncio
import heapq
import itertools

import pytest

from tests.server.conftest import serve, tokenizer  # noqa: F401 - fixtures

# rounds of the event loop after which whoever could run has run
NUM_ROUNDS = 50


class VirtualClock:
    """Jumps to the next sleeper when nobody else can run."""

    def __init__(self):
        self._now_s = 100.0
        self._sleepers = []
        self._order = itertools.count()

    def now_s(self):
        return self._now_s

    async def sleep(self, seconds):
        waking = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), waking))
        await waking

    async def run(self, work):
        """The result of `work`, with time passing as it needs."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(NUM_ROUNDS):
                await asyncio.sleep(0)
            if not task.done() and self._sleepers:
                due_s, _, waking = heapq.heappop(self._sleepers)
                self._now_s = max(self._now_s, due_s)
                if not waking.done():
                    waking.set_result(None)
        return task.result()


@pytest.fixture
def clock():
    return VirtualClock()
