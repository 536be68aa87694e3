"""Decodes the pictures of requests: small ones never behind large ones, and no more bytes than there is room for."""

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from perilune.errors import RequestError
from perilune.text.images.picture import ImageInput, Picture
from perilune.text.images.pixels import Bytes
from perilune.text.prompt.segments import PlacedPicture

# A picture of more pixels takes a good part of a second.
LARGE_PIXELS = 4_000_000
RETRY_AFTER_S = 1


class PictureRoom:
    """The bytes that decoded pictures take, of requests that wait or run.

    They are given back when nobody refers to a picture any more, on whichever thread that is.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # a finalizer may run at any moment, so that it must not need a lock
        self._given_back: deque[int] = deque()

    def take(self, num_bytes: int) -> None:
        """Take room for the pictures of one request; RequestError, status 429, when others have it."""
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"messages holds pictures of {num_bytes} bytes as files and decoded; at most {self._max_bytes} are "
                "allowed: send fewer or smaller ones",
                param="messages",
                code="invalid_image",
            )
        if self.num_bytes + num_bytes > self._max_bytes:
            raise RequestError(
                f"the pictures of other requests take {self._num_bytes} of {self._max_bytes} bytes; "
                f"try again in {RETRY_AFTER_S} s",
                status=429,
                code="pictures_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._given_back.append(num_bytes)

    @property
    def num_bytes(self) -> int:
        """What is taken now."""
        while self._given_back:
            self._num_bytes -= self._given_back.popleft()
        return self._num_bytes


class PictureDecoder:
    """Decodes on threads, of which large pictures have one."""

    def __init__(self, max_bytes: int):
        self.room = PictureRoom(max_bytes)
        self._small = ThreadPoolExecutor(4, "perilune-pictures")
        self._large = ThreadPoolExecutor(1, "perilune-large-pictures")

    def close(self) -> None:
        """Give up what has not begun; nobody waits for what has."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def load(self, placed: Sequence[PlacedPicture]) -> tuple[ImageInput, ...]:
        """The pictures of a request, each file decoded once; RequestError names the field of a broken one."""
        files = {entry.picture.digest: entry.picture for entry in placed}
        self.room.take(sum(picture.num_bytes + picture.num_patch_bytes for picture in files.values()))
        results = await asyncio.gather(*map(self._decode, files.values()), return_exceptions=True)
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error
        decoded = (result for result in results if not isinstance(result, BaseException))
        patches = dict(zip(files, decoded, strict=True))
        return tuple(entry.input(patches[entry.picture.digest]) for entry in placed)

    async def _decode(self, picture: Picture) -> Bytes:
        num_pixels = picture.size.width * picture.size.height
        pool = self._large if num_pixels > LARGE_PIXELS else self._small
        try:
            patches = await asyncio.get_running_loop().run_in_executor(pool, picture.decode)
        except BaseException:
            self.room.give_back(picture.num_bytes + picture.num_patch_bytes)
            raise
        self.room.give_back(picture.num_bytes)
        weakref.finalize(patches, self.room.give_back, picture.num_patch_bytes).atexit = False
        return patches
