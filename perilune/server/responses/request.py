"""Reads a Responses request as a chat request; errors name the fields of the former."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.errors import RequestError
from perilune.server.dialect.places import Places
from perilune.server.openai.chat import DEFAULT_TOP_P
from perilune.server.openai.schema import ChatRequest
from perilune.server.openai.validate import check_length, check_unsupported, check_word
from perilune.server.responses.carried import ENCRYPTED, unpack
from perilune.server.responses.schema import UNSUPPORTED, ResponsesRequest
from perilune.text.prompt.fields import check_keys, read_flag, read_list, read_name, read_object, read_text, shown
from perilune.text.prompt.tools import MAX_TOOLS

# what clients may ask to see; the model's reasoning is shown in any case
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, ENCRYPTED, "message.input_image.image_url")
_TEXT_PARTS = ("input_text", "output_text", "text")
# reasoning, text and calls are items of their own, and one message of the model
ITEMS_OF_A_MESSAGE = 8
_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class Echo:
    """What an answer repeats of its request."""

    fields: Mapping[str, Any]
    carries_reasoning: bool = False


def read_request(request: ResponsesRequest, max_messages: int) -> tuple[ChatRequest, Echo, Places]:
    """The chat request that means the same, what the answer is to repeat, and where the fields came from."""
    if isinstance(request.input, list):
        check_length(request.input, max_messages * ITEMS_OF_A_MESSAGE, "input")
    check_length(request.tools or (), MAX_TOOLS, "tools")
    # false asks for nothing
    request.background = request.background or None
    check_unsupported(request, UNSUPPORTED)
    if request.truncation is not None:
        check_word(request.truncation, ("disabled",), "truncation")
    for name in request.include or ():
        check_word(name, INCLUDABLE, "include")
    places = Places(max_completion_tokens="max_output_tokens", reasoning_effort="reasoning.effort")
    places.note("messages", "input")
    places.note("response_format", "text.format")
    places.note("response_format.json_schema", "text.format")
    shows_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not shows_logprobs:
        raise RequestError(f"top_logprobs is only allowed when include holds {LOGPROBS}", param="top_logprobs")
    if request.stream_options is not None:
        check_keys(request.stream_options, ("include_obfuscation",), "stream_options", "stream_options")
    chat = ChatRequest(
        model=request.model,
        messages=_Items(places).read(request),
        tools=None if request.tools is None else _tools(request.tools, places),
        tool_choice=_tool_choice(request.tool_choice, places),
        parallel_tool_calls=request.parallel_tool_calls,
        temperature=request.temperature,
        top_p=request.top_p,
        max_completion_tokens=request.max_output_tokens,
        logprobs=shows_logprobs or None,
        top_logprobs=request.top_logprobs if shows_logprobs else None,
        reasoning_effort=_effort(request.reasoning),
        response_format=_format(request.text),
        stream=request.stream,
        priority=request.priority,
        timeout=request.timeout,
        cache_salt=request.cache_salt,
    )
    return chat, Echo(_echo(request), ENCRYPTED in (request.include or ())), places


class _Items:
    """Messages in the making; neighbouring items of the assistant (reasoning, text, calls) are one message."""

    def __init__(self, places: Places):
        self._messages: list[dict[str, Any]] = []
        self._places = places

    def read(self, request: ResponsesRequest) -> list[dict[str, Any]]:
        if request.instructions:
            self._add("system", "instructions")["content"] = request.instructions
        if isinstance(request.input, str):
            self._add("user", "input")["content"] = request.input
            return self._messages
        if not request.input:
            raise RequestError("input is empty; give at least one item", param="input")
        for index, item in enumerate(request.input):
            self._read_item(item, f"input[{index}]")
        return self._messages

    def _add(self, role: str, field: str) -> dict[str, Any]:
        self._places.note(f"messages[{len(self._messages)}]", field)
        message: dict[str, Any] = {"role": role}
        self._messages.append(message)
        return message

    def _assistant(self, field: str) -> dict[str, Any]:
        if self._messages and self._messages[-1]["role"] == "assistant":
            return self._messages[-1]
        return self._add("assistant", field)

    def _read_item(self, item: Mapping[str, Any], field: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._read_message(item, field)
        elif kind == "reasoning":
            self._read_reasoning(item, field)
        elif kind == "function_call":
            self._read_call(item, field)
        elif kind == "function_call_output":
            self._read_result(item, field)
        else:
            allowed = "message, reasoning, function_call and function_call_output"
            raise RequestError(f"{field}.type is {shown(kind)}; allowed are {allowed}", param=f"{field}.type")

    def _read_message(self, item: Mapping[str, Any], field: str) -> None:
        check_keys(item, ("type", "role", "content", "id", "status", "phase"), "a message", field)
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            raise RequestError(
                f"{field}.role is {shown(role)}; allowed are user, assistant, system and developer",
                param=f"{field}.role",
            )
        if not isinstance(content, str):
            content = [
                _part(read_object(part, f"{field}.content[{index}]"), f"{field}.content[{index}]")
                for index, part in enumerate(read_list(content, f"{field}.content", "parts"))
            ]
        if role != "assistant":
            self._add(role, field)["content"] = content
            return
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and "content" not in last and "tool_calls" not in last:
            last["content"] = text
        else:
            self._add("assistant", field)["content"] = text

    def _read_reasoning(self, item: Mapping[str, Any], field: str) -> None:
        check_keys(item, ("type", "id", "summary", "content", "encrypted_content", "status"), "a reasoning item", field)
        if not item.get("content"):
            carried = item.get("encrypted_content")
            if carried is not None:
                place = f"{field}.encrypted_content"
                self._add("assistant", field)["reasoning_content"] = unpack(read_text(carried, place), place)
            return
        texts = []
        for index, given in enumerate(read_list(item["content"], f"{field}.content", "parts")):
            place = f"{field}.content[{index}]"
            part = read_object(given, place)
            if part.get("type") != "reasoning_text":
                raise RequestError(
                    f"{place}.type is {shown(part.get('type'))}; allowed is 'reasoning_text'", param=f"{place}.type"
                )
            texts.append(read_text(part.get("text"), f"{place}.text"))
        self._add("assistant", field)["reasoning_content"] = "".join(texts)

    def _read_call(self, item: Mapping[str, Any], field: str) -> None:
        keys = ("type", "id", "call_id", "name", "arguments", "status", "namespace", "caller")
        check_keys(item, keys, "a function call", field)
        call = {
            "id": read_name(item.get("call_id"), f"{field}.call_id"),
            "type": "function",
            "function": {
                "name": read_name(item.get("name"), f"{field}.name"),
                "arguments": read_text(item.get("arguments"), f"{field}.arguments"),
            },
        }
        calls = self._assistant(field).setdefault("tool_calls", [])
        self._places.note(f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}].function", field)
        self._places.note(f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]", field)
        calls.append(call)

    def _read_result(self, item: Mapping[str, Any], field: str) -> None:
        check_keys(item, ("type", "id", "call_id", "output", "status", "caller"), "a function call output", field)
        output = item.get("output")
        if not isinstance(output, str):
            output = [
                _part(read_object(part, f"{field}.output[{index}]"), f"{field}.output[{index}]")
                for index, part in enumerate(read_list(output, f"{field}.output", "parts"))
            ]
        message = self._add("tool", field)
        message |= {"tool_call_id": read_name(item.get("call_id"), f"{field}.call_id"), "content": output}
        self._places.note(f"messages[{len(self._messages) - 1}].tool_call_id", f"{field}.call_id")
        self._places.note(f"messages[{len(self._messages) - 1}].content", f"{field}.output")


def _part(part: Mapping[str, object], field: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        check_keys(part, ("type", "text", "annotations", "logprobs"), "a text part", field)
        return {"type": "text", "text": read_text(part.get("text"), f"{field}.text")}
    if kind == "input_image":
        check_keys(part, ("type", "image_url", "detail"), "a part with a picture", field)
        image: dict[str, Any] = {"url": read_name(part.get("image_url"), f"{field}.image_url")}
        return {"type": "image_url", "image_url": image | {"detail": part.get("detail")}}
    raise RequestError(
        f"{field}.type is {shown(kind)}; allowed are input_text, output_text and input_image", param=f"{field}.type"
    )


def _tools(tools: list[dict[str, Any]], places: Places) -> list[dict[str, Any]]:
    read = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        places.note(f"{field}.function", field)
        if tool.get("type") != "function":
            raise RequestError(
                f"{field}.type is {shown(tool.get('type'))}; allowed is 'function': no tools are run here",
                param=f"{field}.type",
            )
        check_keys(tool, ("type", "name", "description", "parameters", "strict", "defer_loading"), "a tool", field)
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        read.append({"type": "function", "function": function})
    return read


def _tool_choice(given: str | dict[str, Any] | None, places: Places) -> str | dict[str, Any] | None:
    if not isinstance(given, dict) or given.get("type") != "function":
        return given
    check_keys(given, ("type", "name"), "a tool choice", "tool_choice")
    places.note("tool_choice.function", "tool_choice")
    return {"type": "function", "function": {"name": given.get("name")}}


def _effort(given: Mapping[str, object] | None) -> str | None:
    if given is None:
        return None
    check_keys(given, ("effort", "summary", "generate_summary", "context"), "reasoning", "reasoning")
    effort = given.get("effort")
    return None if effort is None else read_name(effort, "reasoning.effort")


def _format(text: Mapping[str, object] | None) -> dict[str, Any] | None:
    if text is None:
        return None
    check_keys(text, ("format", "verbosity"), "text", "text")
    if text.get("format") is None:
        return None
    form = read_object(text["format"], "text.format")
    kind = form.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"text.format.type is {shown(kind)}; it must be a string", param="text.format.type")
    check_word(kind, _FORMATS, "text.format.type")
    if kind != "json_schema":
        check_keys(form, ("type",), "a format", "text.format")
        return {"type": kind}
    check_keys(form, ("type", "name", "description", "schema", "strict"), "a format", "text.format")
    read_flag(form.get("strict"), "text.format.strict")
    keys = ("name", "description", "schema", "strict")
    return {"type": kind, "json_schema": {key: form[key] for key in keys if form.get(key) is not None}}


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": DEFAULT_TOP_P if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
