"""A picture of a request: opened, which reads no more than its header, and then decoded into patches."""

import hashlib
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from perilune.config.media import MediaConfig
from perilune.errors import RequestError
from perilune.text.images.pixels import Bytes, to_patches
from perilune.text.images.size import ImageSize, plan_size

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Of several frames only these are one picture: a preview may follow it.
_STILL_FORMATS = ("JPEG", "MPO")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


@dataclass(frozen=True)
class ImageLimits:
    """What one request may send: pictures, bytes of each as uploaded, pixels of each before it is scaled."""

    max_images: int = 64
    max_bytes: int = 32 * 2**20
    max_pixels: int = 50_000_000


@dataclass(frozen=True, eq=False)
class ImageInput:
    """A decoded picture as the engine takes it.

    Its embeddings stand for the prompt's tokens `start` to `start + num_tokens - 1`; `patches` are uint8
    [rows * columns, 3, P, P]. Equal digests mean equal patches.
    """

    start: int
    num_tokens: int
    digest: bytes
    rows: int
    columns: int
    patches: Bytes

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture whose header was read and found within the limits; `field` is where the request has its file."""

    field: str
    size: ImageSize
    digest: bytes
    num_bytes: int
    _image: Image.Image
    _config: MediaConfig

    @property
    def num_patch_bytes(self) -> int:
        """The bytes that it takes decoded."""
        return self.size.num_patches * 3 * self._config.patch_size**2

    def decode(self) -> Bytes:
        """uint8 patches [rows * columns, 3, P, P]; may be called once. Raises RequestError for a broken picture."""
        try:
            with self._image as image:
                image.load()
                return to_patches(image, self.size, self._config)
        except Exception as error:  # decoders raise whatever a damaged file leads them to
            raise broken(self.field, error) from error


def open_picture(data: bytes, field: str, config: MediaConfig, limits: ImageLimits) -> Picture:
    """Read the header of an uploaded file; RequestError names `field` and what is allowed."""
    if not data:
        raise refused(field, "is a picture of 0 bytes; send the whole file")
    if len(data) > limits.max_bytes:
        raise refused(field, f"is a picture of {len(data)} bytes; at most {limits.max_bytes} are allowed")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
        is_animated = image.format not in _STILL_FORMATS and getattr(image, "is_animated", False)
    except UnidentifiedImageError as error:
        raise refused(field, f"is no picture that can be read; allowed are {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise refused(field, f"has far more than {limits.max_pixels} pixels, the limit; scale it down") from error
    except Exception as error:
        raise broken(field, error) from error
    width, height = image.size
    if width * height > limits.max_pixels:
        raise refused(
            field, f"is a picture of {width} x {height} pixels; at most {limits.max_pixels} are allowed: scale it down"
        )
    if is_animated:
        raise refused(field, "is an animation; send one frame as a picture of its own")
    if image.mode not in _MODES and not image.mode.startswith("I;16"):
        raise refused(field, f"has pixels of the kind {image.mode}; send 8-bit RGB, RGBA or gray")
    return Picture(field, plan_size(width, height, config), hashlib.sha256(data).digest(), len(data), image, config)


def refused(field: str, problem: str) -> RequestError:
    """A picture that is not taken; `problem` goes on after the field's name."""
    return RequestError(f"{field} {problem}", param=field, code="invalid_image")


def broken(field: str, error: Exception) -> RequestError:
    reason = str(error) or type(error).__name__
    return refused(field, f"is a picture that cannot be decoded ({reason[:200]}); send the whole, undamaged file")
