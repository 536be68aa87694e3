"""How large a picture becomes, and how many tokens it takes: arithmetic on its width and height alone."""

import math
from dataclasses import dataclass

from perilune.config.media import MediaConfig


@dataclass(frozen=True)
class ImageSize:
    """What an upload of `width` x `height` pixels becomes.

    It is scaled to `resized`, then padded right and below to `padded` (both width, height); `rows` x `columns` are
    the patches of the padded picture. Nothing is ever enlarged.
    """

    width: int
    height: int
    resized: tuple[int, int]
    padded: tuple[int, int]
    rows: int
    columns: int
    num_tokens: int

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns


def plan_size(width: int, height: int, config: MediaConfig) -> ImageSize:
    """The size of a picture under the limits of `config`.

    The limit on patches holds before padding, so the padded picture may pass it: the largest under the released
    limits has 67,320 patches. Double precision throughout, as the reference, whose truncations depend on it.
    """
    patch, longest = config.patch_size, config.patch_limit_on_one_side * config.patch_size
    area = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(config.in_patch_limit / area), longest / width, longest / height)
    new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
    cell = patch * config.merge_size
    padded = (-(-new_width // cell) * cell, -(-new_height // cell) * cell)
    return ImageSize(
        width=width,
        height=height,
        resized=(new_width, new_height),
        padded=padded,
        rows=padded[1] // patch,
        columns=padded[0] // patch,
        num_tokens=padded[0] // cell * (padded[1] // cell),
    )
