"""This process under measurement: its peak memory, and the time it spends inside the native core."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perilune.ops._native import core

_SELF = Path("/proc/self")
# functions of the core that compute nothing of a step
_ADMINISTRATION = {"isa", "available_isas", "use_isa", "num_threads", "set_num_threads"}


def forget_peak_memory() -> None:
    """Let the peak start at what is held now; a kernel that refuses keeps the old one."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """The largest resident set so far, mapped files included."""
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel lists no VmHWM")


class NativeClock:
    """Adds up the seconds that calls of the native core take while it is running."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap every function of the extension; calls look them up by name each time."""
        native = core()
        originals = {
            name: function
            for name, function in vars(native).items()
            if callable(function) and not name.startswith("_") and name not in _ADMINISTRATION
        }
        for name, function in originals.items():
            setattr(native, name, self._timed(function))
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(native, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return call
