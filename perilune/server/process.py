"""The running server: its socket, its readiness line, and a shutdown that lets answers finish."""

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from perilune.errors import ConfigError

# after the answers were told to end, what they still may take to say so
LAST_WORDS_S = 5
BACKLOG = 2048


class Server(uvicorn.Server):
    """Serves `app` on a bound socket and calls `on_ready` once it accepts connections.

    At SIGINT or SIGTERM it takes no new connection, gives answers in progress `drain_timeout_s` seconds, ends the
    rest with an error that says why, and returns. A second SIGINT ends all answers at once.
    """

    def __init__(self, app: FastAPI, bound: socket.socket, drain_timeout_s: float, on_ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                # its loggers pass their lines on to whatever the process has set up
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(drain_timeout_s) + LAST_WORDS_S,
            )
        )
        self._dispatcher = app.state.dispatcher
        self._bound = bound
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready

    def run_until_stopped(self) -> None:
        """Serve; blocks. To be called from the main thread, whose signal handlers it replaces.

        Raises ConfigError when another process has begun to listen on the port since it was bound.
        """
        host, port = self._bound.getsockname()[:2]
        try:
            self._bound.listen(BACKLOG)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        # uvicorn raises the signal again when it is done, which would turn a clean end into a failure
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.run(sockets=[self._bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        reason = "the server is shutting down; try again later"
        timer = loop.call_later(self._drain_timeout_s, self._dispatcher.interrupt_all, reason)
        await super().shutdown(sockets)
        timer.cancel()
        if self.force_exit:
            # uvicorn leaves the application as it is; an engine in mid-step would crash the end of the process
            self._dispatcher.interrupt_all(reason)
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_S)
            await self.lifespan.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """A socket on which nobody can connect yet, so that a taken port is known before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # the second is for a name that no network knows how to spell
        raise _cannot_listen(host, port, error) from error
    return bound


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason}; choose others with --host and --port "
        "(--port 0 is any that is free)"
    )
