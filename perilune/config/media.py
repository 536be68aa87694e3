"""How pictures are prepared for the vision tower: `preprocessor_config.json`, read strictly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.config.section import Section
from perilune.errors import ConfigError

PREPROCESSOR_FILE = "preprocessor_config.json"
# Only video, which is not served, would need them.
_VIDEO_KEYS = ("in_patch_limit_each_frame", "sample_fps", "temporal_merge_kernel_size")


@dataclass(frozen=True)
class Board:
    """The chessboard behind transparent pixels: squares of `square` pixels, grey levels of 0 to 255."""

    square: int = 8
    is_white_on_top_left: bool = True
    white: int = 255
    gray: int = 180


@dataclass(frozen=True)
class MediaConfig:
    """`media_proc_cfg`; the defaults are the released values. Limits are in patches of `patch_size` pixels."""

    patch_size: int = 14
    merge_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    board: Board = Board()


def load_media_config(directory: Path) -> MediaConfig:
    """The file of a checkpoint directory, or the released values where there is none; raises ConfigError."""
    file = directory / PREPROCESSOR_FILE
    if not file.exists():
        return MediaConfig()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    try:
        return parse_media_config(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_media_config(values: dict[str, Any]) -> MediaConfig:
    """Reads the block `media_proc_cfg`; what surrounds it belongs to other libraries."""
    section = Section(values).section("media_proc_cfg")
    section.fixed("fixed_output_tokens", None, optional=True)
    section.fixed("transparent_bg_fill_stage", "after_resize")
    section.skip(*_VIDEO_KEYS)
    board = section.section("transparent_bg_config")
    board.fixed("pattern", "chessboard")
    config = MediaConfig(
        patch_size=section.integer("patch_size"),
        merge_size=section.integer("merge_kernel_size"),
        in_patch_limit=section.integer("in_patch_limit"),
        patch_limit_on_one_side=section.integer("patch_limit_on_one_side"),
        image_mean=_channels(section, "image_mean"),
        image_std=_channels(section, "image_std"),
        board=Board(
            square=board.integer("chessboard_square_size"),
            is_white_on_top_left=board.boolean("chessboard_square_on_top_left"),
            white=_gray_level(board, "chessboard_white_value"),
            gray=_gray_level(board, "chessboard_gray_value"),
        ),
    )
    if min(config.image_std) <= 0:
        section.refuse("image_std", list(config.image_std), "numbers above 0")
    board.finish()
    section.finish()
    return config


def media_config_to_dict(config: MediaConfig) -> dict[str, Any]:
    """Writes the released form; `parse_media_config` of the result gives back `config`."""
    block = {
        "in_patch_limit": config.in_patch_limit,
        "patch_size": config.patch_size,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
        "merge_kernel_size": config.merge_size,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": config.patch_limit_on_one_side,
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": config.board.square,
            "chessboard_square_on_top_left": config.board.is_white_on_top_left,
            "chessboard_white_value": config.board.white,
            "chessboard_gray_value": config.board.gray,
        },
        "transparent_bg_fill_stage": "after_resize",
    }
    return {"media_proc_cfg": block}


def _channels(section: Section, key: str) -> tuple[float, float, float]:
    value = section.get(key)
    if not isinstance(value, list) or len(value) != 3 or any(type(x) not in (int, float) for x in value):
        section.refuse(key, value, "three numbers")
    red, green, blue = map(float, value)
    return red, green, blue


def _gray_level(section: Section, key: str) -> int:
    value = section.integer(key, minimum=0)
    if value > 255:
        section.refuse(key, value, "an integer from 0 to 255")
    return value
