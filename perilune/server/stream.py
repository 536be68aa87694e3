"""Server-sent events: framing, and the response that sends them."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.server.errors import error_event
from perilune.server.generation import run_while_connected

ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # reverse proxies of the nginx family buffer a whole answer unless told otherwise
    (b"x-accel-buffering", b"no"),
]


def frame(payload: object) -> bytes:
    """One event whose data is `payload` as JSON."""
    return b"data: " + ENCODER.encode(payload) + b"\n\n"


def named_frame(name: str, payload: object) -> bytes:
    """One event of type `name` whose data is `payload` as JSON."""
    return b"event: " + name.encode() + b"\n" + frame(payload)


class EventStream(Response):
    """Sends frames as they come.

    The status is not sent before the first frame exists, so what fails until then is answered as an ordinary error.
    A failure after that becomes an error event. A client that leaves, at any moment, closes `frames`. `headers` are
    asked for when the first frame exists.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], headers: Callable[[], dict[str, str]]):
        super().__init__(media_type="text/event-stream")
        self._frames = frames
        self._more_headers = headers
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_frames(send, scope["path"]))
        except ClientDisconnect:
            if not self._has_started:
                raise

    async def _send_frames(self, send: Send, path: str) -> None:
        async with aclosing(self._frames):
            try:
                async for data in self._frames:
                    if not self._has_started:
                        headers = [*HEADERS, *((k.encode(), v.encode()) for k, v in self._more_headers().items())]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        self._has_started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not self._has_started:
                    raise
                data = error_event(error, path)
                await send({"type": "http.response.body", "body": data, "more_body": False})
                if not isinstance(error, PeriluneError):
                    raise
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
