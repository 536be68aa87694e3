"""Conversations of every skill in the API's own form, and as training rows: tokens, targets and pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perilune.config.media import MediaConfig
from perilune.text.encoding import message_segments
from perilune.text.images.picture import ImageInput
from perilune.text.images.reader import ImageReader
from perilune.text.messages import parse_messages
from perilune.text.prompt.effort import thinking_effort
from perilune.text.prompt.output_format import output_format_message, parse_output_format
from perilune.text.prompt.results import order_results
from perilune.text.prompt.segments import Segment, encode_segments, open_message, open_tag, place_pictures
from perilune.text.prompt.tools import Toolbox, tool_declaration
from perilune.text.tokenizer import Tokenizer

Message = Mapping[str, object]


@dataclass(frozen=True)
class Dialogue:
    """A conversation whose last message is the answer that is expected; every answer in it is right.

    `tools` and `response_format` are those of the OpenAI API; `reasoning_content` of the answers holds the thoughts.
    """

    skill: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    response_format: Message | None = None

    @property
    def asked(self) -> tuple[Message, ...]:
        """What a client sends."""
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        return self.messages[-1]


@dataclass(frozen=True)
class DialogueRow:
    """Token ids, which of them the model must emit, and the pictures that stand among them."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    images: tuple[ImageInput, ...] = ()


def user(text: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": text}


def says(text: str, reasoning: str) -> Message:
    """An answer in words."""
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


class DialogueWriter:
    """Encodes dialogues in the chat format as the server does."""

    def __init__(self, tokenizer: Tokenizer, media: MediaConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self._media = media or MediaConfig()

    def row(self, dialogue: Dialogue, effort: str | None) -> DialogueRow:
        """One row; thinking is off when `effort` is None. The loss covers the answers behind their opening."""
        toolbox = Toolbox()
        history = order_results(parse_messages(dialogue.messages, toolbox, ImageReader(self._media)))
        tools = toolbox.declare(dialogue.tools, "tools")
        form = parse_output_format(dialogue.response_format)
        parts: list[tuple[Sequence[Segment], int | None]] = []
        if tools:
            parts.append((tool_declaration(tools, "tools"), None))
        if effort is not None:
            parts.append((thinking_effort(effort), None))
        stub = open_message("assistant") + open_tag("think" if effort is not None else "response")
        for index, message in enumerate(history):
            if index == len(history) - 1:
                parts.append((output_format_message(form), None))
            is_answer = message.role == "assistant"
            parts.append((list(message_segments(message, effort is not None)), len(stub) if is_answer else None))
        return self._joined(parts)

    def _joined(self, parts: Iterable[tuple[Sequence[Segment], int | None]]) -> DialogueRow:
        ids: list[int] = []
        mask: list[bool] = []
        segments: list[Segment] = []
        for given, num_stub in parts:
            own = encode_segments(given, self._tokenizer)
            num_given = len(own)
            if num_stub is not None:
                num_given = len(encode_segments(given[:num_stub], self._tokenizer))
            ids += own
            mask += [False] * num_given + [True] * (len(own) - num_given)
            segments += given
        placed = place_pictures(segments, ids, self._tokenizer)
        return DialogueRow(tuple(ids), tuple(mask), tuple(x.input(x.picture.decode()) for x in placed))


def expected_calls(answer: Message) -> list[tuple[str, object]]:
    """Name and arguments of every call of an answer; an unset key is no call."""
    calls = answer.get("tool_calls") or []
    assert isinstance(calls, Sequence)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
