import base64
import random
from io import BytesIO

import numpy as np
from PIL import Image

from train.skills.pictures import HEIGHT, MAX_WIDTH, PictureSource, render


def picture_of(dialogue) -> Image.Image:
    url = dialogue.messages[0]["content"][0]["image_url"]["url"]
    return Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))


def test_pictures_are_whole_numbers_of_tokens_and_show_something():
    source = PictureSource(random.Random(1), ["apple", "window"], held_out=False)
    for _ in range(50):
        image = picture_of(source.dialogue())
        assert image.height == HEIGHT
        assert image.width % 28 == 0
        assert image.width <= MAX_WIDTH
        assert np.ptp(np.asarray(image).astype(int)) > 60


def test_equal_generators_draw_equal_pictures_and_others_differ():
    first, second, third = (np.asarray(render("apple", random.Random(seed))) for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert first.shape != third.shape or not np.array_equal(first, third)


def test_ink_reaches_into_the_picture_and_not_over_its_edge():
    for seed in range(40):
        pixels = np.asarray(render("window", random.Random(seed))).astype(float)
        edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        # text would part the edge into two groups of levels
        assert edges.std() < 25


def test_no_number_is_on_both_sides():
    sides = []
    for held_out in (False, True):
        source = PictureSource(random.Random(2), ["apple"], held_out=held_out)
        sides.append({source.dialogue().answer["content"] for _ in range(300)} - {"apple"})
    assert min(map(len, sides)) > 50
    assert not sides[0] & sides[1]
