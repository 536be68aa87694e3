"""This process under measurement: peak memory, time inside the native core, and what other processes use meanwhile."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perilune.ops._native import core

_PROC = Path("/proc")
# functions of the core that compute nothing of a step
_ADMINISTRATION = {"isa", "available_isas", "use_isa", "num_threads", "set_num_threads", "Program", "ExpertCache"}


def forget_peak_memory() -> None:
    """Let the peak start at what is held now; a kernel that refuses keeps the old one."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """The largest resident set so far, mapped files included."""
    for line in (_PROC / "self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel lists no VmHWM")


class OthersClock:
    """Counts from its making on how much of the processors others use than this process and children it waited for."""

    def __init__(self) -> None:
        self._start = time.monotonic(), _machine_busy_s(), _own_busy_s()

    def cores(self) -> float:
        """Processors that others kept busy on average; the kernel counts in ticks, so a hundredth means nothing."""
        started, busy_s, own_s = self._start
        others_s = _machine_busy_s() - busy_s - (_own_busy_s() - own_s)
        return max(0.0, others_s) / (time.monotonic() - started)


def _own_busy_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    return time.process_time() + sum(os.times()[2:4])


def _machine_busy_s() -> float:
    """Processor seconds that all processes together have used since the machine started."""
    fields = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _waiting, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class NativeClock:
    """Adds up the seconds that calls of the native core take while it is running, by the function's name."""

    def __init__(self) -> None:
        self.by_function: dict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> float:
        return sum(self.by_function.values())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap every function of the extension; calls look them up by name each time."""
        native = core()
        originals = {
            name: function
            for name, function in vars(native).items()
            if callable(function) and not name.startswith("_") and name not in _ADMINISTRATION
        }
        timed = originals.pop("replay_timed")
        for name, function in originals.items():
            setattr(native, name, self._timed(name, function))
        native.replay = self._told_apart(timed)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(native, name, function)

    def _told_apart(self, replay_timed: Callable[[Any], dict[str, float]]) -> Callable[[Any], None]:
        """A replay whose calls count under their own names."""

        def call(program: Any) -> None:
            for name, seconds in replay_timed(program).items():
                self.by_function[name] += seconds

        return call

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.by_function[name] += time.perf_counter() - start
            return result

        return call
