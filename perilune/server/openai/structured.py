"""The form that a request demands of the answer, as a grammar."""

from typing import Any

import msgspec

from perilune.errors import RequestError
from perilune.grammar.answer import Body, chat_grammar, choice_body, json_body, lark_body, regex_body, text_grammar
from perilune.grammar.spec import Grammar
from perilune.server.openai.schema import ChatRequest, CompletionRequest, StructuredOutputs
from perilune.text.encoding import EncodedPrompt
from perilune.text.tokenizer import Tokenizer, check_encodable

_FIELD = "structured_outputs"


def grammar_of_chat(request: ChatRequest, prompt: EncodedPrompt, tokenizer: Tokenizer) -> Grammar | None:
    """What the answer must obey: a response format or structured outputs, and what tools and tool choice ask for."""
    body = None if request.structured_outputs is None else _body(request.structured_outputs)
    if body is not None and prompt.form.type != "text":
        raise RequestError(
            f"response_format and {_FIELD} both say what the answer must be; send one of them", param=_FIELD
        )
    return chat_grammar(prompt, tokenizer, body, parallel_calls=request.parallel_tool_calls is not False)


def grammar_of_completion(request: CompletionRequest) -> Grammar | None:
    """What the text must obey."""
    return None if request.structured_outputs is None else text_grammar(_body(request.structured_outputs))


def _body(asked: StructuredOutputs) -> Body:
    given: dict[str, Any] = {
        name: value for name in StructuredOutputs.__struct_fields__ if (value := getattr(asked, name)) is not None
    }
    if len(given) != 1:
        said = ", ".join(given) or "nothing"
        allowed = ", ".join(StructuredOutputs.__struct_fields__)
        raise RequestError(f"{_FIELD} holds {said}; it must hold exactly one of {allowed}", param=_FIELD)
    (name, value), field = next(iter(given.items())), f"{_FIELD}.{next(iter(given))}"
    check_encodable(msgspec.json.encode(value).decode() if name == "json" else "".join(value), param=field)
    if name == "json":
        return json_body(value, field)
    if name == "regex":
        return regex_body(value, field)
    return choice_body(value, field) if name == "choice" else lark_body(value, field)
