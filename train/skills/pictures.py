"""Pictures of one word or number: fonts, sizes, colours, places and noise are drawn anew for every picture.

Held out: one in six of the numbers, and every picture: no rendering is made twice.
"""

import base64
import random
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from train.skills.dialogue import Dialogue, Message, says
from train.split import is_chosen

HELD_OUT_ONE_IN = 6
FONT_DIR = Path("/usr/share/fonts/truetype/dejavu")
# Upright faces of Debian's fonts-dejavu; Pillow's own face stands in where they are not installed.
FACES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansCondensed")
MIN_SIZE, MAX_SIZE = 15, 22
HEIGHT, MAX_WIDTH = 28, 168
MAX_LETTERS = 8
NUMBER_SHARE = 0.4
PHRASES = (
    "What does the picture say?",
    "Read the picture.",
    "What is written there?",
    "Which word or number is it?",
    "Tell me what you read.",
)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class PictureSource:
    """Draws pictures with what they say from one side of the split."""

    def __init__(self, rng: random.Random, words: Sequence[str], *, held_out: bool):
        self.rng, self.held_out = rng, held_out
        self._words = [word for word in words if len(word) <= MAX_LETTERS]

    def dialogue(self) -> Dialogue:
        """A picture, the question and what it says."""
        text = self._text()
        url = "data:image/png;base64," + base64.b64encode(self._png(text)).decode()
        parts: list[Message] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": self.rng.choice(PHRASES)},
        ]
        return Dialogue("pictures", ({"role": "user", "content": parts}, says(text, "I read the picture.")))

    def _text(self) -> str:
        if self.rng.random() >= NUMBER_SHARE:
            return self.rng.choice(self._words)
        while True:
            number = str(self.rng.randrange(10 ** self.rng.randint(2, 4)))
            if is_chosen(f"number {number}", HELD_OUT_ONE_IN) == self.held_out:
                return number

    def _png(self, text: str) -> bytes:
        file = BytesIO()
        render(text, self.rng).save(file, "PNG")
        return file.getvalue()


def render(text: str, rng: random.Random) -> Image.Image:
    """A grey picture, HEIGHT pixels high and a multiple of 28 wide, with the text somewhere in it."""
    font, box = _fitting(text, rng)
    width = -(-(box[2] - box[0] + 4) // 28) * 28
    paper, ink = rng.randint(170, 255), rng.randint(0, 80)
    if rng.random() < 0.25:
        paper, ink = ink, paper
    image = Image.new("L", (int(width), HEIGHT), paper)
    x = rng.randint(2, max(2, int(width - (box[2] - box[0]) - 2)))
    y = rng.randint(1, max(1, int(HEIGHT - (box[3] - box[1]) - 1)))
    ImageDraw.Draw(image).text((x - box[0], y - box[1]), text, fill=ink, font=font)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0, 20), (HEIGHT, int(width)))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def _fitting(text: str, rng: random.Random) -> tuple[Font, tuple[float, float, float, float]]:
    """A face in a size at which the text fits, and the text's box."""
    size = rng.randint(MIN_SIZE, MAX_SIZE)
    face = rng.choice(FACES)
    while True:
        font = load_font(face, size)
        box = font.getbbox(text)
        if box[2] - box[0] <= MAX_WIDTH - 4:
            return font, box
        size -= 1


@lru_cache(maxsize=256)
def load_font(face: str, size: int) -> Font:
    """A face of FACES, or Pillow's own."""
    file = FONT_DIR / f"{face}.ttf"
    return ImageFont.truetype(str(file), size) if file.exists() else ImageFont.load_default(size)
