"""From a decoded picture to the patches that the vision tower reads, step by step as the reference does it.

H, W: padded height and width; L: patches; P: patch size.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from perilune.config.media import Board, MediaConfig
from perilune.text.images.size import ImageSize

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

# Modes with an alpha band, and what they are called with colours multiplied by it.
_PREMULTIPLIED = {"LA": "La", "RGBA": "RGBa"}
# Their values are indices or bits, between which there is nothing.
_INDEXED = ("1", "P")
# Rows of a transparent picture that are put on the board at once.
_BAND = 64


def to_patches(image: Image.Image, size: ImageSize, config: MediaConfig) -> Bytes:
    """A decoded picture of any mode -> uint8 patches [L, 3, P, P], row after row of the picture."""
    image = _resized(_eight_bit(image), size.resized)
    colours = _on_board(image, config.board) if _is_transparent(image) else np.asarray(image.convert("RGB"))
    width, height = size.padded
    pixels_HWC = np.zeros((height, width, 3), np.uint8)
    pixels_HWC[: colours.shape[0], : colours.shape[1]] = colours
    patch = config.patch_size
    split = pixels_HWC.reshape(size.rows, patch, size.columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(split).reshape(size.num_patches, 3, patch, patch)


def normalised(patches: Bytes, config: MediaConfig) -> Floats:
    """uint8 patches [L, 3, P, P] -> float32: x / 255, minus the mean, times the rounded reciprocal of the deviation."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255.0)
    values = np.empty(patches.shape, np.float32)
    for channel, (mean, std) in enumerate(zip(config.image_mean, config.image_std, strict=True)):
        table = (levels - np.float32(mean)) * np.float32(1.0 / std)
        values[:, channel] = table[patches[:, channel]]
    return values


def _eight_bit(image: Image.Image) -> Image.Image:
    """A picture of 16-bit gray levels by their upper bytes, as the other 16-bit formats are decoded."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic in the picture's own mode, columns before rows whatever order the library prefers."""
    if image.size == size:
        return image
    if image.mode in _INDEXED:
        return image.resize(size, Image.Resampling.NEAREST)
    mode = image.mode
    if mode in _PREMULTIPLIED:
        image = image.convert(_PREMULTIPLIED[mode])
    for step in ((size[0], image.size[1]), size):
        if image.size != step:
            image = image.resize(step, Image.Resampling.BICUBIC)
    return image.convert(mode) if mode in _PREMULTIPLIED else image


def _is_transparent(image: Image.Image) -> bool:
    """A colour of an RGB picture that is declared transparent does not count."""
    return image.mode != "RGB" and image.has_transparency_data


def _on_board(image: Image.Image, board: Board) -> Bytes:
    """A transparent picture over the board, [height, width, 3]; fractions are cut off."""
    pixels = np.asarray(image.convert("RGBA"))
    result = np.empty((*pixels.shape[:2], 3), np.uint8)
    columns = np.arange(pixels.shape[1]) // board.square
    first_level, other = (board.white, board.gray) if board.is_white_on_top_left else (board.gray, board.white)
    levels = np.array([first_level, other], np.float32)
    for first in range(0, pixels.shape[0], _BAND):
        band: NDArray[Any] = pixels[first : first + _BAND].astype(np.float32)
        alpha = band[..., 3:] / np.float32(255.0)
        squares = np.arange(first, first + band.shape[0])[:, None] // board.square + columns
        behind = levels[squares % 2][..., None]
        result[first : first + _BAND] = (alpha * band[..., :3] + (np.float32(1.0) - alpha) * behind).astype(np.uint8)
    return result
