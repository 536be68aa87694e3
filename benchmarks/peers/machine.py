"""The machine under the measurement: idle or not, how fast it reads, one core taken away."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

# a run is disturbed when other processes used more than this share of one core
DISTURBED_CORES = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def busy_cpu_s() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(ticks) for ticks in fields[:7])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def wait_until_idle(limit_s: float) -> bool:
    """Wait until the machine was idle for a second; False if that did not happen within `limit_s`."""
    end = time.monotonic() + limit_s
    while True:
        before, start = busy_cpu_s(), time.monotonic()
        time.sleep(1.0)
        if (busy_cpu_s() - before) / (time.monotonic() - start) <= DISTURBED_CORES:
            return True
        if time.monotonic() > end:
            return False


def read_bandwidth(probe: Path, threads: int) -> float:
    """Bytes per second that `threads` sequential streams read: the median of seven passes over a gigabyte."""
    output = subprocess.run([str(probe), str(threads), "1024", "7"], check=True, capture_output=True, text=True).stdout
    return 1e9 * float(median(json.loads(output)["gb_per_s"]))


class Neighbour:
    """A process that keeps one core busy; `cpu_s` holds what it used once it has ended."""

    cpu_s = 0.0

    @contextmanager
    def running(self, core: int) -> Iterator[None]:
        """Keep `core` busy. A session of its own: the scheduler may group processes by session."""
        line = [sys.executable, "-c", "while True: pass"]
        process = subprocess.Popen(line, start_new_session=True)
        os.sched_setaffinity(process.pid, {core})
        try:
            yield
        finally:
            process.kill()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s = usage.ru_utime + usage.ru_stime


@contextmanager
def exclusive(lock: Path | None) -> Iterator[None]:
    """Hold the file lock `lock`, so that those who share the machine can take turns; no lock without a path."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_into_page_cache(path: Path) -> None:
    """Read a file, or every file of a directory, once."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as stream:
            buffer = bytearray(1 << 24)
            while stream.readinto(buffer):
                pass


def describe_machine() -> dict[str, str | int | float]:
    """Processor, cores, memory and system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.machine()),
        "family": f"{facts.get('cpu family')}/{facts.get('model')}",
        "vector": " ".join(f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if f in flags),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
    }
