"""Bodies of requests, read within limits and off the loop where that would hold others up; and answers in JSON."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from perilune.errors import RequestError
from perilune.server.settings import ServerSettings

T = TypeVar("T")

# a body larger than this is parsed and tokenized on a thread, so that running streams are not held up
INLINE_BODY_BYTES = 16 * 1024
# a body that may hold a picture is read on the threads for those; JSON may spell the word with escapes
MAY_HOLD_IMAGES = re.compile(rb"image|\\u")


class Bodies:
    """Reads bodies within the limits of `settings`."""

    def __init__(self, settings: ServerSettings):
        self._limit = settings.max_body_bytes

    async def read(self, request: Request, read: Callable[[bytes], T]) -> T:
        """The body of `request` as `read` understands it."""
        body = await self._bytes(request)
        if MAY_HOLD_IMAGES.search(body):
            return await asyncio.get_running_loop().run_in_executor(request.app.state.image_pool, read, body)
        if len(body) <= INLINE_BODY_BYTES:
            return read(body)
        return await asyncio.to_thread(read, body)

    async def _bytes(self, request: Request) -> bytes:
        """The body, of which no more than the limit is ever held."""
        announced = request.headers.get("content-length", "")
        body = bytearray()
        is_too_large = announced.isdigit() and int(announced) > self._limit
        if not is_too_large:
            async for part in request.stream():
                body += part
                if is_too_large := len(body) > self._limit:
                    break
        if is_too_large:
            raise RequestError(
                f"the body is larger than {self._limit} bytes, which is the limit of this server",
                status=413,
                code="request_too_large",
            )
        return bytes(body)


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
