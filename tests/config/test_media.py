"""How pictures are prepared, as checkpoints say it."""

import copy
import json

import pytest

from perilune.config.media import Board, MediaConfig, load_media_config, media_config_to_dict, parse_media_config
from perilune.errors import ConfigError

RELEASED = media_config_to_dict(MediaConfig())


def changed(**values):
    found = copy.deepcopy(RELEASED)
    found["media_proc_cfg"] |= values
    return found


def test_what_is_written_is_read_back():
    config = MediaConfig(in_patch_limit=100, image_mean=(0.4, 0.5, 0.6), board=Board(4, False, 250, 5))
    assert parse_media_config(media_config_to_dict(config)) == config


def test_what_surrounds_the_block_and_what_only_video_needs_is_passed_over():
    assert parse_media_config({**changed(sample_fps=8.0), "auto_map": {"AutoImageProcessor": "x"}}) == MediaConfig()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is 64; allowed: null"),
        ({"transparent_bg_fill_stage": "before_resize"}, 'allowed: "after_resize"'),
        ({"in_patch_limit": 0}, "in_patch_limit is 0; allowed: an integer of at least 1"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is [0.5, 0.5]; allowed: three numbers"),
        ({"image_mean": [0.5, 0.5, True]}, "three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std is [0.5, 0.5, 0.0]; allowed: numbers above 0"),
        ({"patch_limit": 5}, "patch_limit is not a known key"),
        ({"transparent_bg_config": {}}, "pattern is missing"),
    ],
)
def test_another_way_than_the_released_one_is_refused(values, text):
    with pytest.raises(ConfigError) as error:
        parse_media_config(changed(**values))
    assert text in str(error.value)


def test_a_gray_level_is_a_byte():
    values = changed()
    values["media_proc_cfg"]["transparent_bg_config"]["chessboard_gray_value"] = 256
    with pytest.raises(ConfigError, match="an integer from 0 to 255"):
        parse_media_config(values)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read as JSON"):
        load_media_config(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: media_proc_cfg is missing"):
        load_media_config(tmp_path)
