"""A conversation in the model's own format.

The prompt is a list of segments, each markup (a control token) or content (ordinary text), encoded one by one. So
nothing that a message holds can become a control token, and segment borders are token borders as in training.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perilune.errors import RequestError
from perilune.text.channels import Channel
from perilune.text.messages import ChatMessage, parse_messages
from perilune.text.special import CLOSE, END_OF_MSG, OPEN, SEP
from perilune.text.tokenizer import Tokenizer

THINKING_EFFORTS = ("low", "high", "max")

# The text promises `medium`, which the model was not trained with.
_EFFORT_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt: the name of one control token, or text that is encoded as it stands."""

    text: str
    is_markup: bool


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready to be continued by the model.

    The last `num_stub_tokens` open the channel in which the answer starts; the released API does not count them.
    """

    token_ids: tuple[int, ...]
    start_channel: Channel
    num_stub_tokens: int


def encode_chat(
    messages: Sequence[Mapping[str, object]], tokenizer: Tokenizer, *, thinking: bool = True, effort: str = "max"
) -> EncodedPrompt:
    """Encode system, user and assistant turns and what opens the answer; `effort` counts only with `thinking`.

    A last assistant message with `partial: true` is left open to be continued. Raises RequestError naming the field.
    """
    parsed = parse_messages(messages)
    last = parsed[-1]
    history = parsed[:-1] if last.is_partial else parsed
    body = [*thinking_effort(effort)] if thinking else []
    for message in history:
        body += message_segments(message, thinking)
    if last.is_partial:
        stub, start = partial_segments(last, thinking)
        return EncodedPrompt(tuple(encode_segments([*body, *stub], tokenizer)), start, 0)
    body += open_message("assistant")
    stub = open_tag("think" if thinking else "response")
    stub_ids = encode_segments(stub, tokenizer)
    return EncodedPrompt(
        token_ids=(*encode_segments(body, tokenizer), *stub_ids),
        start_channel=Channel.REASONING if thinking else Channel.CONTENT,
        num_stub_tokens=len(stub_ids),
    )


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of the segments, each encoded alone."""
    ids: list[int] = []
    for segment in segments:
        if segment.is_markup:
            ids.append(tokenizer.special_ids[segment.text])
        else:
            ids += tokenizer.encode(segment.text)
    return ids


def render_markup(segments: Iterable[Segment]) -> str:
    """The prompt as one string for people to read; encoding it again is not the same."""
    return "".join(segment.text for segment in segments)


def open_tag(tag: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """`<|open|>tag key="value"<|sep|>`; key, quotes and value are segments of their own."""
    segments = [_markup(OPEN), _content(tag)]
    for key, value in (attributes or {}).items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [_content(f" {key}"), _content('="'), _content(escaped), _content('"')]
    return [*segments, _markup(SEP)]


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`"""
    return [_markup(CLOSE), _content(tag), _markup(SEP)]


def open_message(role: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """The opening of a message; the role comes before the other attributes."""
    return open_tag("message", {"role": role, **(attributes or {})})


def close_message() -> list[Segment]:
    """The end of a message."""
    return [*close_tag("message"), _markup(END_OF_MSG)]


def system_message(kind: str, body: str) -> list[Segment]:
    """A system message that the server itself writes; its body is stripped."""
    return [*open_message("system", {"type": kind}), _content(body.strip()), *close_message()]


def thinking_effort(effort: str) -> list[Segment]:
    """The message that tells the model how much to think."""
    if effort not in THINKING_EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort!r}; allowed are {', '.join(THINKING_EFFORTS)}, and none for no thinking",
            param="reasoning_effort",
        )
    return system_message("thinking-effort", _EFFORT_BODY.format(effort=effort))


def message_segments(message: ChatMessage, thinking: bool) -> list[Segment]:
    """One message of the history."""
    if message.role == "assistant":
        body = [*_channel("think", _reasoning(message)), *_channel("response", message.content)]
        if not thinking:
            body = _channel("response", message.content)
    else:
        body = [_content(message.content)]
    return [*open_message(message.role, _name(message)), *body, *close_message()]


def partial_segments(message: ChatMessage, thinking: bool) -> tuple[list[Segment], Channel]:
    """The beginning of an answer, left open, and the channel in which it goes on."""
    segments = open_message("assistant", _name(message))
    reasoning = _reasoning(message) if thinking else ""
    if thinking and not message.content:
        return [*segments, *open_tag("think"), _content(reasoning)], Channel.REASONING
    if reasoning:
        segments += _channel("think", reasoning)
    return [*segments, *open_tag("response"), _content(message.content)], Channel.CONTENT


def _channel(tag: str, text: str) -> list[Segment]:
    return [*open_tag(tag), _content(text), *close_tag(tag)]


def _reasoning(message: ChatMessage) -> str:
    return message.reasoning if message.reasoning.strip() else ""


def _name(message: ChatMessage) -> dict[str, str]:
    return {} if message.name is None else {"name": message.name}


def _content(text: str) -> Segment:
    return Segment(text, is_markup=False)


def _markup(name: str) -> Segment:
    return Segment(name, is_markup=True)
