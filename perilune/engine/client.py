"""How everything above reaches an engine: one protocol, and the client whose engine is a thread of this process.

The engine thread sleeps on a condition variable while it has nothing to do. Results of one step reach each event loop
in one wake-up. This module knows no tensors: the engine core is handed to it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from perilune.engine.request import GenerateRequest, RequestOutput
from perilune.engine.stats import EngineStats


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the served model; `created` is a Unix time in seconds."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int


class EngineClient(Protocol):
    """An engine as its users see it. Every method may be called from any thread."""

    @property
    def model(self) -> ModelInfo: ...

    def start(self) -> None:
        """Begin to serve; called once."""

    def stop(self, timeout_s: float) -> None:
        """Refuse new requests, let the running ones finish for `timeout_s`, abort the rest, and end. Blocks."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, up to and with the one that has a finish reason.

        What can never be served raises RequestError or CapacityError from this call itself. The request is submitted
        when the first output is awaited; closing the generator, or cancelling the task that waits in it, aborts the
        request, which is free within one step.
        """

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with reason abort. An unknown id is ignored."""

    def stats(self) -> EngineStats:
        """The counters as they were after the latest step."""

    def check_health(self) -> str | None:
        """None while requests can be served, else the reason why not."""
