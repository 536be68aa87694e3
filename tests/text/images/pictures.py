"""Pictures as files and data URLs, made for tests."""

import base64
import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image


def photo(width, height, mode="RGB", seed=0):
    """Smooth colours with some noise, in any mode."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] + rng.integers(0, 50, (height, width, 3))
    return Image.fromarray(ramp.astype(np.uint8)).convert(mode)


def file_of(image, kind="PNG", **options):
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_part(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def png_header(width, height):
    """A PNG that announces a size and holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [
        struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) for body in (header, b"IDAT")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
