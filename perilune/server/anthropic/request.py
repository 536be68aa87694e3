"""Reads an Anthropic request as a chat request; errors name the fields of the former."""

from collections.abc import Mapping
from typing import Any

from perilune.errors import RequestError
from perilune.server.anthropic.schema import UNSUPPORTED, Asked, MessagesRequest
from perilune.server.dialect.places import Places
from perilune.server.openai.schema import ChatRequest, Thinking
from perilune.server.openai.validate import check_length, check_unsupported, check_word
from perilune.text.prompt.fields import check_keys, read_flag, read_list, read_name, read_object, read_text, shown
from perilune.text.prompt.tools import MAX_TOOLS

_NO_EFFECT = ("cache_control",)
_TOOL_KEYS = (
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "eager_input_streaming",
    "input_examples",
    "allowed_callers",
    "defer_loading",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_request(request: Asked, max_messages: int) -> tuple[ChatRequest, Places]:
    """The chat request that means the same, and where its fields came from."""
    check_length(request.messages, max_messages, "messages")
    check_length(request.tools or (), MAX_TOOLS, "tools")
    check_unsupported(request, UNSUPPORTED)
    if request.thread is not None:
        # by this code the official client's tool runner knows to send the whole conversation instead
        raise RequestError(
            "thread is not supported: nothing is stored here; send the whole conversation in messages",
            param="thread",
            code="thread_unsupported_request",
        )
    places = Places(
        stop="stop_sequences",
        reasoning_effort="output_config.effort",
        response_format="output_config.format",
    )
    places.note("response_format.json_schema.schema", "output_config.format.schema")
    chat = ChatRequest(
        model=request.model,
        messages=_Conversation(places).read(request),
        tools=None if request.tools is None else _tools(request.tools, places),
        thinking=_thinking(request.thinking),
    )
    _read_tool_choice(request.tool_choice, chat, places)
    _read_output(request.output_config, chat)
    if isinstance(request, MessagesRequest):
        if request.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {request.max_tokens}; it must be an integer of at least 1", param="max_tokens"
            )
        chat.max_tokens = request.max_tokens
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.stop = request.stop_sequences
        chat.stream = request.stream
        chat.priority, chat.timeout, chat.cache_salt = request.priority, request.timeout, request.cache_salt
    return chat, places


class _Conversation:
    """Messages in the making; one message of the client may become several, since results of tools stand alone."""

    def __init__(self, places: Places):
        self._messages: list[dict[str, Any]] = []
        self._places = places

    def read(self, request: Asked) -> list[dict[str, Any]]:
        if request.system not in (None, "", []):
            system = request.system
            if isinstance(system, list):
                system = "".join(self._text(block, f"system[{index}]") for index, block in enumerate(system))
            self._add("system", "system")["content"] = system
        for index, message in enumerate(request.messages):
            self._read_message(message, f"messages[{index}]")
        if not request.messages:
            raise RequestError("messages is empty; give at least one message", param="messages")
        if request.messages[-1].get("role") == "assistant":
            # the model goes on from an answer that stands at the end
            self._messages[-1]["partial"] = True
        return self._messages

    def _add(self, role: str, place: str) -> dict[str, Any]:
        self._places.note(f"messages[{len(self._messages)}]", place)
        message: dict[str, Any] = {"role": role}
        self._messages.append(message)
        return message

    def _read_message(self, message: Mapping[str, Any], field: str) -> None:
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{field}.role is {shown(role)}; allowed are user, assistant and system", param=f"{field}.role"
            )
        check_keys(message, ("role", "content", *_NO_EFFECT), "a message", field)
        content = message.get("content")
        if isinstance(content, str):
            self._add(role, field)["content"] = content
            return
        blocks = read_list(content, f"{field}.content", "blocks")
        if role == "system":
            text = "".join(self._text(block, f"{field}.content[{index}]") for index, block in enumerate(blocks))
            self._add("system", field)["content"] = text
            return
        read = self._read_user if role == "user" else self._read_assistant
        read([read_object(block, f"{field}.content[{index}]") for index, block in enumerate(blocks)], field)

    def _read_user(self, blocks: list[Mapping[str, object]], field: str) -> None:
        parts: list[dict[str, Any]] | None = None
        for index, block in enumerate(blocks):
            place, kind = f"{field}.content[{index}]", block.get("type")
            if kind == "tool_result":
                parts = None
                self._read_result(block, place)
                continue
            if parts is None:
                parts = self._add("user", field).setdefault("content", [])
            parts.append(self._part(block, place, len(parts), "text, image and tool_result"))
        if not blocks:
            self._add("user", field)["content"] = ""

    def _read_result(self, block: Mapping[str, object], field: str) -> None:
        check_keys(block, ("type", "tool_use_id", "content", "is_error", *_NO_EFFECT), "a tool result", field)
        read_flag(block.get("is_error"), f"{field}.is_error")
        message = self._add("tool", field)
        content = block.get("content")
        if isinstance(content, list):
            message["content"] = []
            for index, given in enumerate(content):
                place = f"{field}.content[{index}]"
                part = self._part(read_object(given, place), place, index, "text and image")
                message["content"].append(part)
        else:
            message["content"] = "" if content is None else read_text(content, f"{field}.content")
        message["tool_call_id"] = read_name(block.get("tool_use_id"), f"{field}.tool_use_id")
        self._places.note(f"messages[{len(self._messages) - 1}].tool_call_id", f"{field}.tool_use_id")

    def _read_assistant(self, blocks: list[Mapping[str, object]], field: str) -> None:
        message = self._add("assistant", field)
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            place, kind = f"{field}.content[{index}]", block.get("type")
            if kind == "text":
                texts.append(self._text(block, place))
            elif kind == "thinking":
                # the signature of a thought is opaque and says nothing here
                check_keys(block, ("type", "thinking", "signature", *_NO_EFFECT), "a thinking block", place)
                thoughts.append(read_text(block.get("thinking"), f"{place}.thinking"))
            elif kind == "tool_use":
                self._places.note(f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}].function", place)
                self._places.note(f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]", place)
                calls.append(_call(block, place))
            else:
                raise _wrong_block(kind, place, "text, thinking and tool_use")
        message |= {"content": "".join(texts), "reasoning_content": "".join(thoughts)}
        if calls:
            message["tool_calls"] = calls

    def _part(self, block: Mapping[str, object], field: str, index: int, allowed: str) -> dict[str, Any]:
        """Part `index` of the latest message."""
        kind = block.get("type")
        part_field = f"messages[{len(self._messages) - 1}].content[{index}]"
        self._places.note(part_field, field)
        if kind == "text":
            return {"type": "text", "text": self._text(block, field)}
        if kind != "image":
            raise _wrong_block(kind, field, allowed)
        self._places.note(f"{part_field}.image_url.url", f"{field}.source")
        return _image(block, field)

    @staticmethod
    def _text(block: object, field: str) -> str:
        given = read_object(block, field)
        if given.get("type") != "text":
            raise _wrong_block(given.get("type"), field, "text")
        check_keys(given, ("type", "text", "citations", *_NO_EFFECT), "a text block", field)
        return read_text(given.get("text"), f"{field}.text")


def _wrong_block(kind: object, field: str, allowed: str) -> RequestError:
    return RequestError(f"{field}.type is {shown(kind)}; allowed here: {allowed}", param=f"{field}.type")


def _image(block: Mapping[str, object], field: str) -> dict[str, Any]:
    check_keys(block, ("type", "source", *_NO_EFFECT), "an image block", field)
    field = f"{field}.source"
    source = read_object(block.get("source"), field)
    kind = source.get("type")
    if kind == "base64":
        check_keys(source, ("type", "media_type", "data"), "an image source", field)
        media_type = read_name(source.get("media_type"), f"{field}.media_type")
        url = f"data:{media_type};base64,{read_name(source.get('data'), f'{field}.data')}"
    elif kind == "url":
        check_keys(source, ("type", "url"), "an image source", field)
        url = read_name(source.get("url"), f"{field}.url")
    else:
        raise RequestError(f"{field}.type is {shown(kind)}; allowed are base64 and url", param=f"{field}.type")
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Mapping[str, object], field: str) -> dict[str, Any]:
    check_keys(block, ("type", "id", "name", "input", "caller", *_NO_EFFECT), "a tool use", field)
    arguments = read_object(block.get("input"), f"{field}.input")
    function = {"name": read_name(block.get("name"), f"{field}.name"), "arguments": arguments}
    return {"id": read_name(block.get("id"), f"{field}.id"), "type": "function", "function": function}


def _tools(tools: list[dict[str, Any]], places: Places) -> list[dict[str, Any]]:
    read = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        places.note(f"{field}.function", field)
        places.note(f"{field}.function.parameters", f"{field}.input_schema")
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{field}.type is {shown(tool['type'])}; allowed is 'custom': this server runs no tools of its own",
                param=f"{field}.type",
            )
        check_keys(tool, (*_TOOL_KEYS, *_NO_EFFECT), "a tool", field)
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        function = {name: tool[key] for key, name in names.items() if tool.get(key) is not None}
        if "parameters" not in function:
            raise RequestError(f"{field}.input_schema is missing", param=f"{field}.input_schema", code="missing_field")
        read.append({"type": "function", "function": function})
    return read


def _thinking(given: Mapping[str, object] | None) -> Thinking | None:
    if given is None:
        return None
    check_keys(given, ("type", "budget_tokens", "display"), "thinking", "thinking")
    kind = given.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"thinking.type is {shown(kind)}; it must be a string", param="thinking.type")
    check_word(kind, ("enabled", "adaptive", "disabled"), "thinking.type")
    # how long the model thinks is not ours to bound; the number is checked only so that a slip is seen
    budget = given.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise RequestError(
            f"thinking.budget_tokens is {shown(budget)}; it must be an integer of at least 1",
            param="thinking.budget_tokens",
        )
    return Thinking(type="disabled" if kind == "disabled" else "enabled")


def _read_tool_choice(given: Mapping[str, object] | None, chat: ChatRequest, places: Places) -> None:
    if given is None:
        return
    check_keys(given, ("type", "name", "disable_parallel_tool_use"), "a tool choice", "tool_choice")
    kind = given.get("type")
    if kind == "tool":
        places.note("tool_choice.function.name", "tool_choice.name")
        chat.tool_choice = {"type": "function", "function": {"name": given.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat.tool_choice = _CHOICES[kind]
    else:
        raise RequestError(
            f"tool_choice.type is {shown(kind)}; allowed are auto, any, tool and none", param="tool_choice.type"
        )
    if read_flag(given.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"):
        places.note("parallel_tool_calls", "tool_choice.disable_parallel_tool_use")
        chat.parallel_tool_calls = False


def _read_output(given: Mapping[str, object] | None, chat: ChatRequest) -> None:
    if given is None:
        return
    check_keys(given, ("effort", "format"), "output_config", "output_config")
    if (effort := given.get("effort")) is not None:
        chat.reasoning_effort = read_name(effort, "output_config.effort")
    if given.get("format") is not None:
        form = read_object(given["format"], "output_config.format")
        check_keys(form, ("type", "schema", "name"), "a format", "output_config.format")
        schema = {"name": "answer", "schema": form.get("schema")}
        chat.response_format = {"type": form.get("type"), "json_schema": schema}
