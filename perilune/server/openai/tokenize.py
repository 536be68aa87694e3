"""Counts the tokens of a text or of a chat request, as the answering routes would encode them."""

from typing import Any

import msgspec

from perilune.engine.client import ModelInfo
from perilune.server.choice import token_text
from perilune.server.openai.prompt import chat_prompt
from perilune.server.openai.schema import TokenizeChatRequest, TokenizeRequest
from perilune.server.openai.validate import check_model, decode_body
from perilune.server.settings import ServerSettings
from perilune.text.prompt.room import Room
from perilune.text.tokenizer import Tokenizer, check_encodable


class _Kind(msgspec.Struct):
    """What tells the two bodies apart."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def tokenize(body: bytes, model: ModelInfo, tokenizer: Tokenizer, settings: ServerSettings) -> dict[str, Any]:
    """The token ids of the body's `prompt`, in which names of control tokens stand for those, or of its chat."""
    asked: TokenizeRequest | TokenizeChatRequest
    room = Room(model.max_model_len, tokenizer, counts_only=True)
    if _is_chat(body):
        asked = decode_body(body, TokenizeChatRequest)
        check_model(asked.model, model)
        token_ids = list(chat_prompt(asked, tokenizer, settings, model.media, room).token_ids)
    else:
        asked = decode_body(body, TokenizeRequest)
        check_model(asked.model, model)
        check_encodable(asked.prompt, "prompt")
        room.take(asked.prompt, "prompt")
        token_ids = tokenizer.encode_markup(asked.prompt)
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": [token_text(tokenizer, token_id) for token_id in token_ids] if asked.return_token_strs else None,
    }


def describe(tokenizer: Tokenizer, model: ModelInfo) -> dict[str, Any]:
    """What clients want to know before they count tokens themselves; nothing stands before or around a text."""
    return {
        "tokenizer_class": "tiktoken",
        "vocab_size": model.vocab_size,
        "model_max_length": model.max_model_len,
        "eos_token": token_text(tokenizer, tokenizer.end_of_msg_id),
        "bos_token": None,
        "pad_token": None,
        "add_bos_token": False,
        "chat_template": None,
    }


def _is_chat(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Kind).messages is not msgspec.UNSET
    except (msgspec.DecodeError, RecursionError):
        return False
