"""Bodies of requests, read within limits and off the loop where that would hold others up; and answers in JSON."""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
MAY_NAME_THE_WEB = re.compile(rb"https?:|\\u", re.IGNORECASE)
# and one of which a grammar may be written never on the loop, however small it is
MAY_HOLD_GRAMMAR = re.compile(rb"tools|schema|format|structured_outputs")
# one as large as this waits for others of its kind, and for none that is smaller
LARGE_BODY_BYTES = 1024 * 1024


class ReadingPools:
    """The threads on which bodies are read, by what a body costs."""

    def __init__(self) -> None:
        self.small = ThreadPoolExecutor(4, "perilune-bodies")
        self.large = ThreadPoolExecutor(2, "perilune-large-bodies")
        self.images = ThreadPoolExecutor(4, "perilune-images")
        # where pictures are fetched, threads mostly wait
        self.web = ThreadPoolExecutor(16, "perilune-web-images")

    def close(self) -> None:
        """Give up what has not begun; nobody waits for what has."""
        for pool in (self.small, self.large, self.images, self.web):
            pool.shutdown(wait=False, cancel_futures=True)


class Bodies:
    """Reads bodies within the limits of `settings`."""

    def __init__(self, settings: ServerSettings):
        self._limit = settings.max_body_bytes
        self._fetches = settings.allow_image_urls

    async def read(self, request: Request, read: Callable[[bytes], T]) -> T:
        """The body of `request` as `read` understands it."""
        body = await self._bytes(request)
        pools: ReadingPools = request.app.state.reading_pools
        if MAY_HOLD_IMAGES.search(body):
            pool = pools.web if self._fetches and MAY_NAME_THE_WEB.search(body) else pools.images
        elif len(body) > LARGE_BODY_BYTES:
            pool = pools.large
        elif len(body) > INLINE_BODY_BYTES or MAY_HOLD_GRAMMAR.search(body):
            pool = pools.small
        else:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(pool, read, body)

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
