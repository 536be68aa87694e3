"""What clients upload: every kind of broken, odd and dangerous file."""

import numpy as np
import pytest
from PIL import Image

from perilune.config.media import MediaConfig
from perilune.errors import RequestError
from perilune.text.images.picture import FORMATS, ImageLimits, open_picture
from perilune.text.images.pixels import to_patches
from perilune.text.images.size import plan_size
from tests.text.images.pictures import file_of, photo, png_header

FIELD = "messages[0].content[0].image_url.url"
CONFIG = MediaConfig()


def opened(data, limits=None):
    return open_picture(data, FIELD, CONFIG, limits or ImageLimits())


def refusal(data, limits=None):
    """What is said about a file that cannot be opened, or not be decoded."""
    with pytest.raises(RequestError) as raised:
        opened(data, limits).decode()
    assert raised.value.param == FIELD
    assert raised.value.status == 400
    assert raised.value.code == "invalid_image"
    assert str(raised.value).startswith(FIELD)
    return str(raised.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_decoded(kind):
    image = photo(60, 40, "P" if kind == "GIF" else "RGB")
    picture = opened(file_of(image, kind))
    assert (picture.size.width, picture.size.height, picture.size.num_tokens) == (60, 40, 6)
    assert picture.decode().shape == (24, 3, 14, 14)


def test_a_lossless_picture_becomes_the_patches_of_its_pixels():
    image = photo(60, 40)
    expected = to_patches(image, plan_size(60, 40, CONFIG), CONFIG)
    assert np.array_equal(opened(file_of(image)).decode(), expected)


@pytest.mark.parametrize(
    ("width", "height", "num_tokens"), [(1, 1, 1), (1, 4000, 143), (4000, 1, 143), (5472, 3648, 16590)]
)
def test_sizes_at_the_edge_are_decoded(width, height, num_tokens):
    picture = opened(file_of(Image.new("RGB", (width, height), (1, 2, 3))))
    assert picture.size.num_tokens == num_tokens
    assert picture.decode()[0, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("L", "JPEG"), ("LA", "PNG"), ("1", "PNG"), ("P", "GIF")])
def test_modes_other_than_rgb_are_decoded(mode, kind):
    picture = opened(file_of(photo(60, 40, mode), kind))
    shown = picture.decode()[:, 0]
    assert abs(shown.mean() - opened(file_of(photo(60, 40))).decode()[:, 0].mean()) < 20


def test_sixteen_bits_of_gray_are_scaled_and_not_cut():
    levels = np.linspace(0, 65535, 60 * 40).reshape(40, 60).astype(np.uint16)
    picture = opened(file_of(Image.fromarray(levels)))
    assert picture.decode()[0, 0, 0, 0] == 0
    assert np.array_equal(picture.size.resized, (60, 40))
    gray = opened(file_of(Image.fromarray((levels >> 8).astype(np.uint8)))).decode()
    assert np.array_equal(opened(file_of(Image.fromarray(levels))).decode(), gray)


def test_an_orientation_tag_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = opened(file_of(photo(60, 40), "JPEG", exif=exif))
    assert (picture.size.width, picture.size.height) == (60, 40)


def test_the_preview_of_a_photo_is_no_animation():
    data = file_of(photo(60, 40), "MPO", save_all=True, append_images=[photo(6, 4)])
    assert opened(data).size.num_tokens == 6


def test_a_file_of_no_bytes_is_refused():
    assert "0 bytes" in refusal(b"")


@pytest.mark.parametrize(
    "data", [b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n", b"GIF89a"]
)
def test_what_is_no_picture_is_refused(data):
    assert "JPEG, PNG, WEBP, GIF, BMP" in refusal(data) or "cannot be decoded" in refusal(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_picture_is_refused(kind):
    data = file_of(photo(300, 200, "P" if kind == "GIF" else "RGB"), kind)
    assert "cannot be decoded" in refusal(data[: len(data) // 2])


def test_a_damaged_picture_is_refused():
    data = bytearray(file_of(photo(300, 200)))
    data[len(data) // 2] ^= 0xFF
    assert "cannot be decoded" in refusal(bytes(data))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_refused(kind):
    data = file_of(photo(60, 40), kind, save_all=True, append_images=[photo(60, 40, seed=1)])
    assert "one frame" in refusal(data)


def test_too_many_bytes_are_refused_with_the_limit():
    assert "at most 100 are allowed" in refusal(file_of(photo(60, 40)), ImageLimits(max_bytes=100))


@pytest.mark.parametrize(("width", "height"), [(8000, 7000), (60000, 1000)])
def test_too_many_pixels_are_refused_before_they_are_decoded(width, height):
    assert f"{width} x {height} pixels; at most 50000000 are allowed" in refusal(png_header(width, height))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 60_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_by_its_header(side):
    assert "pixels" in refusal(png_header(side, side))


def test_a_bomb_of_compressed_text_is_refused():
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for _ in range(80):
        info.add_text("comment", "x" * 2**20, zip=True)
    assert "cannot be decoded" in refusal(file_of(photo(60, 40), pnginfo=info))


def test_pixels_of_32_bits_are_refused():
    data = bytearray(file_of(Image.fromarray(np.zeros((40, 60), np.int32)), "TIFF"))
    assert "JPEG, PNG" in refusal(bytes(data))


def test_equal_files_have_equal_digests_and_others_do_not():
    digests = [opened(file_of(photo(60, 40, seed=seed))).digest for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
