"""The process in which grammars are tried out: `python -m perilune.grammar.trial FD`.

A grammar can keep its compiler busy for days, or crash it, and neither can be stopped inside the engine's process. So
each is compiled first in a child of this one, within bounds that the system keeps. Over the socket FD come the
vocabulary, and then a socket for each trial; this process ends when FD is closed.
"""

import os
import resource
import signal
import socket
import sys

import msgspec

from perilune.grammar.backends.library import Library, Refusal, judge, load_library
from perilune.grammar.spec import Grammar
from perilune.text.tokenizer import Tokenizer

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
# less than any thread of the engine's process has, so that what passes here does not overflow there
MAX_STACK_BYTES = 1024 * 1024
LENGTH_BYTES = 8


class Setup(msgspec.Struct):
    """The vocabulary of the engine, and the name of the library that compiles for it."""

    ranks: list[bytes]
    names: list[str]
    vocab_size: int
    library: str


class Order(msgspec.Struct):
    """One grammar, and how many seconds of processor time it may take."""

    grammar: Grammar
    cpu_s: float


class Verdict(msgspec.Struct):
    """What came out of a trial that stayed within its bounds."""

    refusal: Refusal | None


def send(connection: socket.socket, message: object) -> None:
    """Send one message, its length first."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)


def receive(connection: socket.socket) -> bytes | None:
    """One message as it was sent; None if the other side has gone."""
    head = _exactly(connection, LENGTH_BYTES)
    return None if head is None else _exactly(connection, int.from_bytes(head, "little"))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    body = bytearray()
    while len(body) < num_bytes:
        part = connection.recv(min(num_bytes - len(body), 1 << 20))
        if not part:
            return None
        body += part
    return bytes(body)


def serve(control: socket.socket) -> None:
    """Run trials until `control` is closed."""
    body = receive(control)
    if body is None:
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    tokenizer = Tokenizer({token: rank for rank, token in enumerate(setup.ranks)}, setup.names)
    library = load_library(setup.library, tokenizer, setup.vocab_size)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            try:
                control.close()
                with socket.socket(fileno=descriptors[0]) as connection:
                    _try(connection, library)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _try(connection: socket.socket, library: Library) -> None:
    body = receive(connection)
    if body is None:
        return
    order = msgspec.msgpack.decode(body, type=Order)
    _bound(order.cpu_s)
    send(connection, Verdict(judge(library, order.grammar)))


def _bound(cpu_s: float) -> None:
    """Let the system end this process when it takes more than a trial may."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, used + MAX_MEMORY_BYTES),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
    ):
        resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        serve(parent)
