"""The channels of a generation and the pieces in which its text is handed on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Channel(Enum):
    """Where a token belongs. A generation starts in TEXT (no channels), REASONING or CONTENT.

    MARKUP is for tokens that carry no text for the reader: control tokens, tag names, dropped parts.
    """

    TEXT = "text"
    REASONING = "reasoning"
    CONTENT = "content"
    MARKUP = "markup"


@dataclass(frozen=True)
class Delta:
    """Text of one channel and the token ids it came from.

    Over a whole generation the ids of all deltas are the generated ids, in order and once each. `is_resent` marks
    text that was already given as reasoning and has turned out to be the content; it carries no ids.
    """

    channel: Channel
    text: str
    token_ids: tuple[int, ...]
    is_resent: bool = False


def merge_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one channel."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if last and last.channel is delta.channel and not last.is_resent and not delta.is_resent:
            merged[-1] = replace(last, text=last.text + delta.text, token_ids=last.token_ids + delta.token_ids)
        else:
            merged.append(delta)
    return merged


@dataclass(frozen=True)
class Transcript:
    """A finished generation: what the deltas add up to. `content` is also the text of a generation without channels."""

    reasoning: str = ""
    content: str = ""
    reasoning_token_ids: tuple[int, ...] = ()
    content_token_ids: tuple[int, ...] = ()


def collect(deltas: Iterable[Delta]) -> Transcript:
    """Add up all deltas of a generation; text that is sent again as content is no longer reasoning."""
    texts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
    ids: dict[Channel, list[int]] = {channel: [] for channel in Channel}
    for delta in deltas:
        channel = Channel.CONTENT if delta.channel is Channel.TEXT else delta.channel
        if delta.is_resent:
            texts[Channel.REASONING].clear()
            ids[Channel.CONTENT] += ids[Channel.REASONING]
            ids[Channel.REASONING].clear()
        texts[channel].append(delta.text)
        ids[channel] += delta.token_ids
    return Transcript(
        reasoning="".join(texts[Channel.REASONING]),
        content="".join(texts[Channel.CONTENT]),
        reasoning_token_ids=tuple(ids[Channel.REASONING]),
        content_token_ids=tuple(ids[Channel.CONTENT]),
    )
