"""The pieces of a prompt: markup (a control token) or content (ordinary text), each encoded alone.

So nothing that a message holds can become a control token, and segment borders are token borders as in training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perilune.text.special import CLOSE, END_OF_MSG, OPEN, SEP
from perilune.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt: the name of one control token, or text that is encoded as it stands."""

    text: str
    is_markup: bool


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of the segments, each encoded alone."""
    ids: list[int] = []
    for segment in segments:
        if segment.is_markup:
            ids.append(tokenizer.special_ids[segment.text])
        else:
            ids += tokenizer.encode(segment.text)
    return ids


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
