"""Reads the pictures that one request refers to: as data URLs, or from the web where that is allowed."""

import binascii
import time
from collections.abc import Callable

from perilune.config.media import MediaConfig
from perilune.text.images.fetch import DEADLINE_S, fetch
from perilune.text.images.picture import ImageLimits, Picture, open_picture, refused
from perilune.text.prompt.fields import shown

Fetch = Callable[[str, str, int], bytes]
_WEB = ("http://", "https://")


class ImageReader:
    """Opens the pictures of one request in turn and counts them. `allows_web` lets it fetch http and https URLs."""

    def __init__(
        self,
        config: MediaConfig,
        limits: ImageLimits | None = None,
        *,
        allows_web: bool = False,
        fetch: Fetch = fetch,
    ):
        self._config = config
        self._limits = limits or ImageLimits()
        self._allows_web = allows_web
        self._fetch = fetch
        self._num_opened = 0
        self._began_to_fetch_s: float | None = None

    def open(self, url: str, field: str) -> Picture:
        """The picture behind `url`, its header checked; RequestError names `field`."""
        self._num_opened += 1
        if self._num_opened > self._limits.max_images:
            raise refused(field, f"is one picture more than {self._limits.max_images}, which one request may hold")
        return open_picture(self._data(url, field), field, self._config, self._limits)

    def _data(self, url: str, field: str) -> bytes:
        if url[:5].lower() == "data:":
            return self._decoded(url, field)
        if not url.lower().startswith(_WEB):
            raise refused(field, f"is {shown(url)}; send the picture as data:image/png;base64,...")
        if not self._allows_web:
            raise refused(
                field,
                "is a web address, and this server fetches none (--allow-image-urls lets it): send the picture as "
                "data:image/png;base64,...",
            )
        now_s = time.monotonic()
        if self._began_to_fetch_s is None:
            self._began_to_fetch_s = now_s
        if now_s - self._began_to_fetch_s > DEADLINE_S:
            raise refused(
                field, f"comes after {DEADLINE_S:g} s of fetching other pictures, which is the limit; send data: URLs"
            )
        return self._fetch(url, field, self._limits.max_bytes)

    def _decoded(self, url: str, field: str) -> bytes:
        head, comma, payload = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise refused(field, "is a data: URL without base64; send data:image/png;base64,...")
        if len(payload) // 4 * 3 > self._limits.max_bytes + 3:
            raise refused(
                field, f"is a picture of {len(payload) // 4 * 3} bytes; at most {self._limits.max_bytes} are allowed"
            )
        try:
            return binascii.a2b_base64("".join(payload.split()), strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise refused(field, f"is no valid base64 ({error})") from error
