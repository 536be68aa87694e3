"""What crosses between a server and its engine process, and the pipe that carries it.

Messages are pickled: both ends are the same program, and nobody else holds an end.
"""

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perilune.config.engine import EngineConfig
from perilune.config.media import MediaConfig
from perilune.engine.host.streams import Turn
from perilune.engine.policy.check import RequestCheck
from perilune.engine.request import GenerateRequest, RequestOutput
from perilune.engine.stats import EngineStats


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be made: what it is made from, and with how many threads (None: all processors).

    `prepare` is called in the new process before anything else, to set up its log.
    """

    checkpoint: Path
    config: EngineConfig
    num_threads: int | None
    step_timeout_s: float
    prepare: Callable[[], None]


@dataclass(frozen=True)
class Ready:
    """The engine is made; `media` says how pictures are prepared."""

    check: RequestCheck
    media: MediaConfig | None


@dataclass(frozen=True)
class Failed:
    """The engine could not be made, for a reason that a person can cause."""

    error: Exception


@dataclass(frozen=True)
class Submit:
    """Take a request."""

    request: GenerateRequest


@dataclass(frozen=True)
class Abort:
    """End a request."""

    request_id: str


@dataclass(frozen=True)
class Inspect:
    """Say what is held; the answer carries the same number."""

    number: int


@dataclass(frozen=True)
class Stop:
    """Let requests finish for so long, abort the rest, and end the process."""

    timeout_s: float


@dataclass(frozen=True)
class Outputs:
    """What a step brought; `stats` come now and then, and whenever there is nothing left to do."""

    outputs: tuple[RequestOutput, ...]
    turn: Turn
    stats: EngineStats | None


@dataclass(frozen=True)
class Refused:
    """A request was not served; `was_taken` says whether a turn counts it."""

    request_id: str
    error: Exception
    was_taken: bool


@dataclass(frozen=True)
class Inspected:
    """The answer to `Inspect`."""

    number: int
    holdings: dict[str, Any]


@dataclass(frozen=True)
class Alive:
    """Said every few seconds, also in the middle of a step."""


@dataclass(frozen=True)
class Health:
    """A step hangs, and why that is known, or None: it has ended."""

    complaint: str | None


@dataclass(frozen=True)
class Ended:
    """The engine is over, and why."""

    reason: str


class Pipe:
    """One end: whole messages both ways, sent from any thread, received by one."""

    def __init__(self, descriptor: int):
        self._connection = Connection(descriptor)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Blocks while the other end reads nothing; OSError when it is gone."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> object | None:
        """The next message; None when the other end is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self._connection.close()
