"""Threads on which grammars are compiled, so that slow ones wait for each other and for no one else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perilune.grammar.compiler import NotQuick

T = TypeVar("T")

QUICK_THREADS = 4


class CompileLanes:
    """Two lanes: in one, every grammar is tried for a tenth of a second; what takes longer goes to the other."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix="perilune-grammar")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="perilune-slow-grammar")

    def start(self, warm_up: Callable[[], None]) -> None:
        self._quick.submit(warm_up)

    def stop(self) -> None:
        """Give up what has not begun."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[bool], T]) -> T:
        """The result of `work`, which is told whether it must be quick and raises NotQuick where it cannot."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._quick, work, True)
        except NotQuick:
            return await loop.run_in_executor(self._slow, work, False)

    def submit(self, work: Callable[[bool], None]) -> None:
        """The same for work that deals with its own result and its other errors; returns at once."""
        self._quick.submit(self._try, work)

    def _try(self, work: Callable[[bool], None]) -> None:
        try:
            work(True)
        except NotQuick:
            self._slow.submit(work, False)
