"""Tries grammars out in a process of their own, which this one starts and feeds."""

import contextlib
import socket
import subprocess
import sys
import threading
import weakref

import msgspec

from perilune.errors import RequestError
from perilune.grammar.backends.library import Refusal
from perilune.grammar.spec import Grammar
from perilune.grammar.trial import Order, Setup, Verdict, receive, send
from perilune.text.tokenizer import Tokenizer

# how long an overloaded machine may keep a verdict back
PATIENCE_S = 60.0


class TookTooMuch(Exception):
    """A grammar took more processor time, memory or stack than a trial may."""


class Sandbox:
    """Runs trials side by side; may be used from any thread. The process starts with the first one, or `start`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, library: str):
        self._library = library
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that the first trial does not wait for it."""
        with self._lock:
            self._running()

    def judge(self, grammar: Grammar, cpu_s: float) -> Refusal | None:
        """Why `grammar` cannot be used, if so; TookTooMuch when that takes more than `cpu_s` of processor time.

        Raises RequestError with status 503 when there is no verdict within a minute.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(PATIENCE_S)
            try:
                send(ours, Order(grammar, cpu_s))
                body = receive(ours)
            except TimeoutError as error:
                raise RequestError(
                    "the machine is too busy to compile the grammar of this request; try again later",
                    status=503,
                    code="overloaded",
                ) from error
            except OSError:
                body = None
        if body is None:
            if self._process is None or self._process.poll() is not None:
                raise RequestError(
                    "the process that compiles grammars has ended; try again", status=503, code="overloaded"
                )
            raise TookTooMuch
        return msgspec.msgpack.decode(body, type=Verdict).refusal

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            try:
                socket.send_fds(self._running(), [b"t"], [connection.fileno()])
            except OSError:
                # it has gone: killed from outside, perhaps for memory
                self._end()
                socket.send_fds(self._running(), [b"t"], [connection.fileno()])

    def _running(self) -> socket.socket:
        if self._control is None:
            control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "perilune.grammar.trial", str(theirs.fileno())]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            ranks = [self._tokenizer.token_bytes(token_id) for token_id in range(self._tokenizer.num_ranks)]
            names = [
                self._tokenizer.token_bytes(token_id).decode()
                for token_id in range(self._tokenizer.num_ranks, self._tokenizer.vocab_size)
            ]
            self._control, self._process = control, process
            self._finalizer = weakref.finalize(self, _close, control, process)
            send(control, Setup(ranks, names, self._vocab_size, self._library))
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._finalizer()
            self._control = self._process = None


def _close(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
