"""The channels of a generation and the pieces in which its text is handed on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Channel(Enum):
    """Where a token belongs. A generation starts in TEXT (no channels), REASONING, CONTENT or TOOLS.

    TOOLS holds the arguments of tool calls. MARKUP is for tokens that carry no text for the reader: control tokens,
    tag names, dropped parts.
    """

    TEXT = "text"
    REASONING = "reasoning"
    CONTENT = "content"
    TOOLS = "tools"
    MARKUP = "markup"


@dataclass(frozen=True)
class CallPart:
    """Which tool call a delta belongs to, calls being counted from 0 in their order of appearance.

    `name` stands on the first delta of a call, whose text is empty, and only there; `is_end` on the last one.
    """

    index: int
    name: str | None = None
    is_end: bool = False


@dataclass(frozen=True)
class Delta:
    """Text of one channel and the token ids it came from; in TOOLS also the `call` whose arguments go on with it.

    Over a whole generation the ids of all deltas are the generated ids, in order and once each. `is_resent` marks
    text that was already given as reasoning and has turned out to be the content; it carries no ids.
    """

    channel: Channel
    text: str
    token_ids: tuple[int, ...]
    is_resent: bool = False
    call: CallPart | None = None


def merge_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one channel; the first delta of a tool call stays by itself."""
    runs: list[list[Delta]] = []
    for delta in deltas:
        if runs and _can_join(runs[-1][-1], delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [_join(run) for run in runs]


def _can_join(first: Delta, second: Delta) -> bool:
    if first.channel is not second.channel or first.is_resent or second.is_resent:
        return False
    parts = [delta.call for delta in (first, second) if delta.call is not None]
    return all(part.name is None and part.index == parts[0].index for part in parts)


def _join(run: Sequence[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    text = "".join(delta.text for delta in run)
    token_ids = tuple(token_id for delta in run for token_id in delta.token_ids)
    return replace(run[-1], text=text, token_ids=token_ids)


@dataclass(frozen=True)
class Call:
    """A call of a tool as the model made it; `arguments` are JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Transcript:
    """A finished generation: what the deltas add up to. `content` is also the text of a generation without channels.

    `calls` are those that came to their end; one that was cut is left out.
    """

    reasoning: str = ""
    content: str = ""
    reasoning_token_ids: tuple[int, ...] = ()
    content_token_ids: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()


def collect(deltas: Iterable[Delta]) -> Transcript:
    """Add up all deltas of a generation; text that is sent again as content is no longer reasoning."""
    texts: dict[Channel, list[str]] = {channel: [] for channel in Channel}
    ids: dict[Channel, list[int]] = {channel: [] for channel in Channel}
    calls: list[Call] = []
    name = ""
    for delta in deltas:
        channel = Channel.CONTENT if delta.channel is Channel.TEXT else delta.channel
        if delta.is_resent:
            texts[Channel.REASONING].clear()
            ids[Channel.CONTENT] += ids[Channel.REASONING]
            ids[Channel.REASONING].clear()
        if delta.call is not None and delta.call.name is not None:
            name = delta.call.name
            texts[channel].clear()
        texts[channel].append(delta.text)
        if delta.call is not None and delta.call.is_end:
            calls.append(Call(name, "".join(texts[channel])))
        ids[channel] += delta.token_ids
    return Transcript(
        reasoning="".join(texts[Channel.REASONING]),
        content="".join(texts[Channel.CONTENT]),
        reasoning_token_ids=tuple(ids[Channel.REASONING]),
        content_token_ids=tuple(ids[Channel.CONTENT]),
        calls=tuple(calls),
    )
