"""A conversation in the model's own format: which segments a chat request becomes, and in which order."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from perilune.text.channels import Channel
from perilune.text.images.picture import ImageInput
from perilune.text.images.pixels import Bytes
from perilune.text.images.reader import ImageReader
from perilune.text.messages import ChatMessage, parse_messages
from perilune.text.prompt.calls import tools_channel
from perilune.text.prompt.effort import thinking_effort
from perilune.text.prompt.output_format import OutputFormat, output_format_message, parse_output_format
from perilune.text.prompt.results import order_results, with_pictures
from perilune.text.prompt.room import Room
from perilune.text.prompt.segments import (
    PlacedPicture,
    Segment,
    close_message,
    content,
    element,
    encode_segments,
    open_message,
    open_tag,
    picture,
    place_pictures,
)
from perilune.text.prompt.tools import (
    Tool,
    Toolbox,
    ToolChoice,
    new_tool_declaration,
    parse_tool_choice,
    tool_choice_message,
    tool_declaration,
)
from perilune.text.special import END_OF_MSG
from perilune.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready to be continued by the model.

    The last `num_stub_tokens` open the channel in which the answer starts; the released API does not count them.
    `tools` are those that the answer may call: none if none are declared or if the request forbids calls. `choice` and
    `form` are what the prompt says of calls and of the form of the answer. Other prompts are likely to go on
    differently behind the tokens that `branch_points` count: tools and instructions, and the whole history. `segments`
    are what was encoded, and `pictures` lie where they stand in it.
    """

    token_ids: tuple[int, ...]
    start_channel: Channel
    num_stub_tokens: int
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    form: OutputFormat = field(default_factory=OutputFormat)
    branch_points: tuple[int, ...] = field(default=(), compare=False)
    segments: tuple[Segment, ...] = field(default=(), compare=False, repr=False)
    pictures: tuple[PlacedPicture, ...] = ()

    def load_images(self) -> tuple[ImageInput, ...]:
        """Decode the pictures; one that stands there twice is decoded once. RequestError names a broken one's field."""
        patches: dict[bytes, Bytes] = {}
        for placed in self.pictures:
            if placed.picture.digest not in patches:
                patches[placed.picture.digest] = placed.picture.decode()
        return tuple(placed.input(patches[placed.picture.digest]) for placed in self.pictures)


def encode_chat(
    messages: Sequence[Mapping[str, object]],
    tokenizer: Tokenizer,
    *,
    thinking: bool = True,
    effort: str = "max",
    tools: object = None,
    tool_choice: object = None,
    response_format: object = None,
    images: ImageReader | None = None,
    room: Room | None = None,
) -> EncodedPrompt:
    """Encode a conversation and what opens the answer; `effort` counts only with `thinking`.

    `tools`, `tool_choice` and `response_format` are those of the OpenAI API; a tool choice that names a tool tells
    the model that it must call. A last assistant message with `partial: true` is left open to be continued. Raises
    RequestError naming the field. `images` opens the pictures of users and tools, of which no more than the headers are
    read here; None for a model that sees none. `room` refuses a prompt that is too long before it is encoded.
    """
    toolbox = Toolbox()
    declared = () if tools is None else toolbox.declare(tools, "tools")
    history = order_results(parse_messages(messages, toolbox, images))
    choice = parse_tool_choice(tool_choice, toolbox)
    form = parse_output_format(response_format)
    last = history[-1]
    body = _Collected(room)
    body.add(tool_declaration(declared, "tools") if declared else [], "tools")
    body.add(thinking_effort(effort) if thinking else [], "reasoning_effort")
    num_leading, num_system = body.num_messages, sum(1 for _ in takewhile(_is_system, history))
    for index, message in with_pictures(history[:-1] if last.is_partial else history):
        body.add(message_segments(message, thinking, f"messages[{index}]"), f"messages[{index}]")
    num_told = body.num_messages
    body.add(tool_choice_message(choice), "tool_choice")
    body.add(output_format_message(form), "response_format")
    if last.is_partial:
        opening, start = partial_segments(last, thinking)
    else:
        body.add(open_message("assistant"), "messages")
        opening, start = _opening(thinking)
    stub = _Collected(room)
    stub.add(opening, f"messages[{len(history) - 1}]")
    body_ids, stub_ids = body.encode(tokenizer), stub.encode(tokenizer)
    return EncodedPrompt(
        token_ids=(*body_ids, *stub_ids),
        start_channel=start,
        num_stub_tokens=0 if last.is_partial else len(stub_ids),
        tools=toolbox.callable_with(choice),
        choice=choice,
        form=form,
        branch_points=_message_ends(body_ids, (num_leading + num_system, num_told), tokenizer),
        segments=(*body.segments, *stub.segments),
        pictures=tuple(place_pictures(body.segments, body_ids, tokenizer)),
    )


class _Collected:
    """Segments in their order, for as long as there is room."""

    def __init__(self, room: Room | None):
        self.segments: list[Segment] = []
        self._room = room

    def add(self, segments: Iterable[Segment], field: str) -> None:
        for segment in segments:
            if self._room is not None:
                self._room.take(segment.text, field)
            self.segments.append(segment)

    @property
    def num_messages(self) -> int:
        """How many messages have ended."""
        return sum(segment.is_markup and segment.text == END_OF_MSG for segment in self.segments)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self._room is None:
            return encode_segments(self.segments, tokenizer)
        ids = encode_segments(self.segments, tokenizer, self._room.at_most)
        self._room.check(len(ids))
        return ids


def _message_ends(token_ids: Sequence[int], counts: Iterable[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """How many tokens so many messages take, for each count but 0; nothing else can yield the token that ends one."""
    end_id = tokenizer.special_ids[END_OF_MSG]
    ends = [index + 1 for index, token_id in enumerate(token_ids) if token_id == end_id]
    return tuple(ends[count - 1] for count in counts if count > 0)


def message_segments(message: ChatMessage, thinking: bool, field: str = "message") -> Iterator[Segment]:
    """One message of the history; `field` names it where its tools cannot be written."""
    if message.tools:
        yield from new_tool_declaration(message.tools, f"{field}.tools")
        return
    yield from open_message(message.role, _attributes(message))
    if message.role == "assistant":
        if thinking:
            yield from element("think", _reasoning(message))
        yield from element("response", message.content)
        yield from tools_channel(message.tool_calls)
    else:
        yield from _content(message)
    yield from close_message()


def partial_segments(message: ChatMessage, thinking: bool) -> tuple[list[Segment], Channel]:
    """The beginning of an answer, left open, and the channel in which it goes on."""
    segments = open_message("assistant", _attributes(message))
    reasoning = _reasoning(message) if thinking else ""
    if thinking and not message.content:
        return [*segments, *open_tag("think"), content(reasoning)], Channel.REASONING
    if reasoning:
        segments += element("think", reasoning)
    return [*segments, *open_tag("response"), content(message.content)], Channel.CONTENT


def _is_system(message: ChatMessage) -> bool:
    return message.role == "system"


def _content(message: ChatMessage) -> list[Segment]:
    if not message.parts or message.role == "tool":
        return [content(message.content)]
    pieces = ([content(part)] if isinstance(part, str) else picture(part) for part in message.parts)
    return [segment for piece in pieces for segment in piece]


def _opening(thinking: bool) -> tuple[list[Segment], Channel]:
    return (open_tag("think"), Channel.REASONING) if thinking else (open_tag("response"), Channel.CONTENT)


def _reasoning(message: ChatMessage) -> str:
    return message.reasoning if message.reasoning.strip() else ""


def _attributes(message: ChatMessage) -> dict[str, str]:
    if message.role == "tool":
        return {"tool": message.name or "", "index": str(message.index)}
    return {} if message.name is None else {"name": message.name}
