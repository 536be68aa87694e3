"""A conversation in the model's own format: which segments a chat request becomes, and in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perilune.text.channels import Channel
from perilune.text.images.picture import ImageInput
from perilune.text.images.pixels import Bytes
from perilune.text.images.reader import ImageReader
from perilune.text.messages import ChatMessage, parse_messages
from perilune.text.prompt.calls import tools_channel
from perilune.text.prompt.effort import thinking_effort
from perilune.text.prompt.output_format import OutputFormat, output_format_message, parse_output_format
from perilune.text.prompt.results import order_results
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
from perilune.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready to be continued by the model.

    The last `num_stub_tokens` open the channel in which the answer starts; the released API does not count them.
    `tools` are those that the answer may call: none if none are declared or if the request forbids calls. `choice` and
    `form` are what the prompt says of calls and of the form of the answer. `segments` are what was encoded, and
    `pictures` lie where they stand in it.
    """

    token_ids: tuple[int, ...]
    start_channel: Channel
    num_stub_tokens: int
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    form: OutputFormat = field(default_factory=OutputFormat)
    segments: tuple[Segment, ...] = field(default=(), compare=False, repr=False)
    pictures: tuple[PlacedPicture, ...] = ()

    def load_images(self) -> tuple[ImageInput, ...]:
        """Decode the pictures; one that stands there twice is decoded once. RequestError names a broken one's field."""
        patches: dict[bytes, Bytes] = {}
        return tuple(_load(placed, patches) for placed in self.pictures)


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
) -> EncodedPrompt:
    """Encode a conversation and what opens the answer; `effort` counts only with `thinking`.

    `tools`, `tool_choice` and `response_format` are those of the OpenAI API; a tool choice that names a tool tells
    the model that it must call. A last assistant message with `partial: true` is left open to be continued. Raises
    RequestError naming the field. `images` opens the pictures of user messages, of which no more than the headers are
    read here; None for a model that sees none.
    """
    toolbox = Toolbox()
    declared = () if tools is None else toolbox.declare(tools, "tools")
    history = order_results(parse_messages(messages, toolbox, images))
    choice = parse_tool_choice(tool_choice, toolbox)
    form = parse_output_format(response_format)
    last = history[-1]
    body = tool_declaration(declared, "tools") if declared else []
    body += thinking_effort(effort) if thinking else []
    for index, message in enumerate(history[:-1] if last.is_partial else history):
        body += message_segments(message, thinking, f"messages[{index}]")
    body += [*tool_choice_message(choice), *output_format_message(form)]
    if last.is_partial:
        stub, start = partial_segments(last, thinking)
    else:
        body += open_message("assistant")
        stub, start = _opening(thinking)
    body_ids, stub_ids = encode_segments(body, tokenizer), encode_segments(stub, tokenizer)
    return EncodedPrompt(
        token_ids=(*body_ids, *stub_ids),
        start_channel=start,
        num_stub_tokens=0 if last.is_partial else len(stub_ids),
        tools=toolbox.callable_with(choice),
        choice=choice,
        form=form,
        segments=(*body, *stub),
        pictures=tuple(place_pictures(body, body_ids, tokenizer)),
    )


def message_segments(message: ChatMessage, thinking: bool, field: str = "message") -> list[Segment]:
    """One message of the history; `field` names it where its tools cannot be written."""
    if message.tools:
        return new_tool_declaration(message.tools, f"{field}.tools")
    body = _content(message)
    if message.role == "assistant":
        body = element("think", _reasoning(message)) if thinking else []
        body += [*element("response", message.content), *tools_channel(message.tool_calls)]
    return [*open_message(message.role, _attributes(message)), *body, *close_message()]


def partial_segments(message: ChatMessage, thinking: bool) -> tuple[list[Segment], Channel]:
    """The beginning of an answer, left open, and the channel in which it goes on."""
    segments = open_message("assistant", _attributes(message))
    reasoning = _reasoning(message) if thinking else ""
    if thinking and not message.content:
        return [*segments, *open_tag("think"), content(reasoning)], Channel.REASONING
    if reasoning:
        segments += element("think", reasoning)
    return [*segments, *open_tag("response"), content(message.content)], Channel.CONTENT


def _content(message: ChatMessage) -> list[Segment]:
    if not message.parts:
        return [content(message.content)]
    pieces = ([content(part)] if isinstance(part, str) else picture(part) for part in message.parts)
    return [segment for piece in pieces for segment in piece]


def _load(placed: PlacedPicture, patches: dict[bytes, Bytes]) -> ImageInput:
    shown, size = placed.picture, placed.picture.size
    if shown.digest not in patches:
        patches[shown.digest] = shown.decode()
    return ImageInput(placed.start, size.num_tokens, shown.digest, size.rows, size.columns, patches[shown.digest])


def _opening(thinking: bool) -> tuple[list[Segment], Channel]:
    return (open_tag("think"), Channel.REASONING) if thinking else (open_tag("response"), Channel.CONTENT)


def _reasoning(message: ChatMessage) -> str:
    return message.reasoning if message.reasoning.strip() else ""


def _attributes(message: ChatMessage) -> dict[str, str]:
    if message.role == "tool":
        return {"tool": message.name or "", "index": str(message.index)}
    return {} if message.name is None else {"name": message.name}
