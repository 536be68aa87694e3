"""The prompt of a chat request, for the routes that answer it and those that only show it."""

from perilune.config.media import MediaConfig
from perilune.server.openai.schema import AsksForChat
from perilune.server.openai.thinking import thinking_mode
from perilune.server.openai.validate import check_length
from perilune.server.settings import ServerSettings
from perilune.text.encoding import EncodedPrompt, encode_chat
from perilune.text.images.reader import ImageReader
from perilune.text.prompt.room import Room
from perilune.text.tokenizer import Tokenizer


def chat_prompt(
    request: AsksForChat,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    media: MediaConfig | None,
    room: Room | None = None,
) -> EncodedPrompt:
    """Encode the conversation and everything else that the model sees; RequestError names the field that is wrong.

    `media` says how the model wants pictures, whose headers are read here; None for a model that sees none. Without
    `room` a prompt of any length is encoded.
    """
    thinking = thinking_mode(request)
    check_length(request.messages, settings.max_messages, "messages")
    return encode_chat(
        request.messages,
        tokenizer,
        thinking=thinking.is_on,
        effort=thinking.effort,
        tools=request.tools,
        tool_choice=request.tool_choice,
        response_format=request.response_format,
        images=None if media is None else ImageReader(media, allows_web=settings.allow_image_urls),
        room=room,
    )
