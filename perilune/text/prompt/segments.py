"""The pieces of a prompt: markup (a control token), content (ordinary text) or a picture, each encoded alone.

So nothing that a message holds can become a control token, and segment borders are token borders as in training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from perilune.text.images.picture import ImageInput, Picture
from perilune.text.images.pixels import Bytes
from perilune.text.special import CLOSE, END_OF_MSG, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, OPEN, SEP
from perilune.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt: the name of one control token, or text that is encoded as it stands.

    The control token of a `picture` stands once for each of its tokens.
    """

    text: str
    is_markup: bool
    picture: Picture | None = None


@dataclass(frozen=True)
class PlacedPicture:
    """A picture and the index of its first token in the prompt."""

    start: int
    picture: Picture

    def input(self, patches: Bytes) -> ImageInput:
        """The picture as the engine takes it, decoded."""
        size = self.picture.size
        return ImageInput(self.start, size.num_tokens, self.picture.digest, size.rows, size.columns, patches)


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer, at_most: int | None = None) -> list[int]:
    """Token ids of the segments, each encoded alone; more than `at_most` are only the first ones."""
    ids: list[int] = []
    for segment in segments:
        if at_most is not None and len(ids) > at_most:
            break
        if segment.picture is not None:
            ids += [tokenizer.special_ids[segment.text]] * segment.picture.size.num_tokens
        elif segment.is_markup:
            ids.append(tokenizer.special_ids[segment.text])
        else:
            ids += tokenizer.encode(segment.text, at_most)
    return ids


def place_pictures(segments: Iterable[Segment], token_ids: Iterable[int], tokenizer: Tokenizer) -> list[PlacedPicture]:
    """Where the pictures of encoded segments are; nothing else can yield their control token."""
    pad_id = tokenizer.special_ids[MEDIA_PAD]
    places = (index for index, token_id in enumerate(token_ids) if token_id == pad_id)
    placed = []
    for segment in segments:
        if segment.picture is not None:
            own = list(islice(places, segment.picture.size.num_tokens))
            placed.append(PlacedPicture(own[0], segment.picture))
    return placed


def picture(shown: Picture) -> list[Segment]:
    """The block of one picture; its text names the size of the upload."""
    return [
        _markup(MEDIA_BEGIN),
        content(f"image {shown.size.width}x{shown.size.height}"),
        _markup(MEDIA_CONTENT),
        Segment(MEDIA_PAD, is_markup=True, picture=shown),
        _markup(MEDIA_END),
    ]


def content(text: str) -> Segment:
    """Text that is encoded as it stands, whatever it spells."""
    return Segment(text, is_markup=False)


def open_tag(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """`<|open|>tag key="value"<|sep|>`; key, quotes and value are segments of their own."""
    segments = [_markup(OPEN), content(tag)]
    for key, value in (attributes or {}).items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [content(f" {key}"), content('="'), content(escaped), content('"')]
    return [*segments, _markup(SEP)]


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`"""
    return [_markup(CLOSE), content(tag), _markup(SEP)]


def element(tag: str, text: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """A tag that holds nothing but text."""
    return [*open_tag(tag, attributes), content(text), *close_tag(tag)]


def open_message(role: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """The opening of a message; the role comes before the other attributes."""
    return open_tag("message", {"role": role, **(attributes or {})})


def close_message() -> list[Segment]:
    """The end of a message."""
    return [*close_tag("message"), _markup(END_OF_MSG)]


def system_message(kind: str, body: str) -> list[Segment]:
    """A system message that the server itself writes; its body is stripped."""
    return [*open_message("system", {"type": kind}), content(body.strip()), *close_message()]


def _markup(name: str) -> Segment:
    return Segment(name, is_markup=True)
