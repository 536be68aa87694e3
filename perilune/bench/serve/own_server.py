"""A server of its own for a load: `perilune serve` in another process, from its ready line to its end."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from perilune.errors import ConfigError

STOP_TIMEOUT_S = 60.0
# what shells give for a process that SIGTERM ended
EXIT_TERMINATED = 143


@dataclass(frozen=True)
class OwnServer:
    """A server that runs: where, and as which process."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[OwnServer]:
    """Start `perilune serve` with `arguments` on a free port; it is ended on the way out.

    What the server says on stderr goes to ours. ConfigError when it ends before it serves. To be entered by the main
    thread, where SIGTERM becomes SystemExit meanwhile, so that it ends the server too.
    """
    command = [sys.executable, "-m", "perilune", "serve", "--host", "127.0.0.1", "--port", "0"]
    command += ["--log-level", "warning", *arguments]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        if found is None:
            raise ConfigError(f"the server ended with exit code {process.wait()} before it was ready: see above")
        yield OwnServer(found[0], process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        signal.signal(signal.SIGTERM, before)
