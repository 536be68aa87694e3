import json

import numpy as np
import pytest
from PIL import Image

from perilune.config.media import MediaConfig, load_media_config, parse_media_config
from perilune.text.images.pixels import normalised, to_patches
from perilune.text.images.size import plan_size

CASES = 13


def golden_cases(directory):
    cases = json.loads((directory / "cases.json").read_text())
    assert len(cases) == CASES
    for case in cases:
        yield case, parse_media_config(json.loads((directory / case["preprocessor"]).read_text()))


def patches_of(image, config):
    size = plan_size(*image.size, config)
    return to_patches(image, size, config), size


def test_patches_equal_the_golden_ones_bit_for_bit(goldens_dir):
    directory = goldens_dir / "vision-tiny"
    for case, config in golden_cases(directory):
        golden = np.load(directory / "golden" / case["golden"])
        patches, size = patches_of(Image.open(directory / "images" / case["image"]), config)
        assert [1, size.rows, size.columns] == golden["grid_thw"].tolist(), case["name"]
        assert size.num_tokens == int(golden["num_tokens"]), case["name"]
        assert np.array_equal(normalised(patches, config), golden["patches"]), case["name"]


def test_the_golden_preprocessor_is_the_default(goldens_dir, tmp_path):
    assert load_media_config(goldens_dir / "vision-tiny") == load_media_config(tmp_path) == MediaConfig()


def test_patches_lie_row_after_row_and_channels_before_pixels():
    picture = np.arange(28 * 42 * 3, dtype=np.uint32).reshape(28, 42, 3).astype(np.uint8)
    patches, _ = patches_of(Image.fromarray(picture), MediaConfig())
    padded = np.zeros((28, 56, 3), np.uint8)
    padded[:, :42] = picture
    assert patches.shape == (8, 3, 14, 14)
    assert np.array_equal(patches[5, 2], padded[14:28, 14:28, 2])


def test_padding_is_black_and_normalises_to_minus_one():
    patches, _ = patches_of(Image.new("RGB", (1, 1), "white"), MediaConfig())
    values = normalised(patches, MediaConfig())
    assert values[0, :, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert np.count_nonzero(values != -1.0) == 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_every_mode_becomes_patches(mode):
    gray = Image.linear_gradient("L").resize((40, 200))
    image = Image.fromarray(np.asarray(gray).astype(np.uint16) << 8) if mode == "I;16" else gray.convert(mode)
    assert image.mode == mode
    config = MediaConfig(in_patch_limit=12)
    patches, _ = patches_of(image, config)
    expected, _ = patches_of(gray.convert("RGB"), config)
    tolerance = 255 if mode == "1" else 4
    assert np.abs(patches.astype(int) - expected).max() <= tolerance
    assert abs(patches.mean() - expected.mean()) < 4


def test_transparent_pixels_show_the_board():
    patches, _ = patches_of(Image.new("RGBA", (28, 28), (0, 0, 0, 0)), MediaConfig())
    picture = patches[:, 0].reshape(2, 2, 14, 14).transpose(0, 2, 1, 3).reshape(28, 28)
    assert picture[0, 0] == picture[8, 8] == picture[0, 16] == 255
    assert picture[0, 8] == picture[8, 0] == picture[23, 8] == 180


def test_a_transparent_colour_of_an_rgb_picture_stays():
    image = Image.new("RGB", (28, 28), (9, 8, 7))
    image.info["transparency"] = (9, 8, 7)
    patches, _ = patches_of(image, MediaConfig())
    assert patches[0, :, 0, 0].tolist() == [9, 8, 7]
