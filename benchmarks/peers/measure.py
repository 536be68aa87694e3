"""Runs one command and says what it took: time, memory, and how much the others disturbed it."""

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.machine import DISTURBED_CORES, Neighbour, busy_cpu_s


class CommandFailed(Exception):
    """A command that ended with an error, or printed no JSON."""


@dataclass(frozen=True)
class Measured:
    """One finished command."""

    stdout: str
    wall_s: float
    first_output_s: float | None
    cpu_s: float
    max_rss_bytes: int
    others_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.others_cores > DISTURBED_CORES

    def json(self) -> dict[str, Any]:
        """The JSON object that is the whole output, or else its last line that is one."""
        for text in (self.stdout, *reversed(self.stdout.splitlines())):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
        raise CommandFailed(f"no JSON object in the output:\n{self.stdout[-2000:]}")


def measure(arguments: list[str], neighbour_core: int | None = None) -> Measured:
    """Run a command to its end, beside a busy process on `neighbour_core` if one is given."""
    neighbour = Neighbour()
    before, own_before = busy_cpu_s(), time.process_time()
    start = time.monotonic()
    if neighbour_core is None:
        measured = _run(arguments)
    else:
        with neighbour.running(neighbour_core):
            measured = _run(arguments)
    wall_s = time.monotonic() - start
    own_s = time.process_time() - own_before + measured.cpu_s + neighbour.cpu_s
    # the kernel counts the machine's time in ticks: a little less than its own is no disturbance
    others_cores = max(0.0, busy_cpu_s() - before - own_s) / wall_s
    return Measured(
        measured.stdout,
        measured.wall_s,
        measured.first_output_s,
        measured.cpu_s,
        measured.max_rss_bytes,
        others_cores,
    )


def _run(arguments: list[str]) -> Measured:
    lines: list[str] = []
    first_output_s = None
    with tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if first_output_s is None and line.strip():
                    first_output_s = time.monotonic() - start
                lines.append(line)
            process.stdout.close()
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            raise
        wall_s = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            raise CommandFailed(f"exit code {process.returncode}: {' '.join(arguments)}\n{errors.read()[-2000:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measured("".join(lines), wall_s, first_output_s, cpu_s, 1024 * usage.ru_maxrss, 0.0)
