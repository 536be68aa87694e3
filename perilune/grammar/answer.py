"""The grammar of an answer: what a request demands of it, inside the model's own channels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, regex_to_lark

from perilune.errors import RequestError
from perilune.grammar.markup import ANY_TEXT, Markup
from perilune.grammar.schema.plain import plain
from perilune.grammar.schema.rule import check_schema, json_rule
from perilune.grammar.spec import Gate, Grammar, Part, literal
from perilune.grammar.tools import ToolRules, is_held_to_schema
from perilune.text.channels import Channel
from perilune.text.encoding import EncodedPrompt
from perilune.text.tokenizer import Tokenizer

MAX_REGEX_CHARS = 16_384
MAX_CHOICES = 8192


@dataclass(frozen=True)
class Body:
    """What the text of an answer must be: a whole Lark grammar, and the field of the request that says so."""

    field: str
    lark: str


def json_body(schema: object, field: str) -> Body:
    """JSON of a schema (draft 2020-12); True is any JSON."""
    check_schema(schema, field)
    return Body(field, f"start: {json_rule(plain(schema))}")


def regex_body(pattern: str, field: str) -> Body:
    """Text that a regular expression matches as a whole."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise RequestError(f"{field} has {len(pattern)} characters; at most {MAX_REGEX_CHARS} are allowed", param=field)
    return Body(field, f"start: /{regex_to_lark(pattern, use_ascii='')}/")


def choice_body(choices: Sequence[str], field: str) -> Body:
    """One of some texts."""
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        raise RequestError(
            f"{field} has {len(choices)} texts; it must hold 1 to {MAX_CHOICES}, none of them empty", param=field
        )
    # a terminal, since the parser itself follows no more than 2000 alternatives at once
    return Body(field, f"start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}")


def lark_body(grammar: str, field: str) -> Body:
    """Text of a Lark grammar with the rule `start`."""
    return Body(field, grammar)


def chat_grammar(
    prompt: EncodedPrompt, tokenizer: Tokenizer, body: Body | None, *, parallel_calls: bool = True
) -> Grammar | None:
    """What the answer to `prompt` must obey; None where everything is allowed. RequestError names the field.

    A prompt that ends inside the answer's text has that beginning held to the grammar too.
    """
    if body is None:
        body = _prompted_body(prompt)
    is_demanded = prompt.choice.mode == "required"
    has_strict = any(is_held_to_schema(tool, is_demanded=is_demanded) for tool in prompt.tools)
    is_single = bool(prompt.tools) and not parallel_calls
    if body is None and not (is_demanded or has_strict or is_single):
        return None
    writer = _Answer(Markup(tokenizer), body)
    if prompt.tools:
        writer.add_tools(prompt, is_demanded=is_demanded, is_single=is_single)
    if body is None and not is_demanded:
        return writer.tools_only()
    if prompt.start_channel is Channel.REASONING:
        return writer.after_thinking(is_demanded)
    return writer.from_content(is_demanded, _begun(prompt, tokenizer))


def text_grammar(body: Body) -> Grammar:
    """The grammar of a text without channels."""
    return _grammar([f"start: {_BODY_NAME}"], body, Gate.ANSWER, _parts(body))


_BODY_NAME = "@answer"


class _Answer:
    def __init__(self, markup: Markup, body: Body | None):
        self._markup = markup
        self._body = body
        self._tools: str | None = None
        self._rules: list[str] = [f"text: {_BODY_NAME if body else ANY_TEXT}"]
        self._parts = _parts(body)
        self._end = markup.close_tag("message")

    def add_tools(self, prompt: EncodedPrompt, *, is_demanded: bool, is_single: bool) -> None:
        rules = ToolRules(self._markup)
        self._tools = rules.add(prompt.tools, is_demanded=is_demanded, is_single=is_single)
        self._rules += [f"tools: {self._tools}", *rules.rules]
        self._parts += rules.parts

    def tools_only(self) -> Grammar:
        """The answer is free but for its calls."""
        free = " | ".join(self._markup.opened(tag) for tag in ("think", "response"))
        start = f"start: {self._markup.opener} ({free} | tools {self._end})"
        return self._grammar(start, Gate.TOOLS)

    def after_thinking(self, is_demanded: bool) -> Grammar:
        opener = self._markup.opener
        self._rules.append(f"channel: {self._markup.opened('response')} {self._after_opening(is_demanded)}")
        if self._tools:
            self._rules[-1] += f" | tools {self._end}"
        reopened = self._markup.opened("think")
        start = f"start: {self._markup.close_tag('think')} {opener} channel | {opener} (channel | {reopened})"
        return self._grammar(start, Gate.THINKING)

    def from_content(self, is_demanded: bool, begun: tuple[int, ...]) -> Grammar:
        return self._grammar(f"start: {self._after_opening(is_demanded)}", Gate.ANSWER, begun)

    def _after_opening(self, is_demanded: bool) -> str:
        """From inside the response to the end of the message."""
        calls = "" if self._tools is None else f"{self._markup.opener} tools"
        if calls and not is_demanded:
            calls = f"({calls})?"
        return f"text {self._markup.close_tag('response')} {calls} {self._end}"

    def _grammar(self, start: str, gate: Gate, begun: tuple[int, ...] = ()) -> Grammar:
        return _grammar([start, *self._rules], self._body, gate, self._parts, begun)


def _grammar(
    rules: Sequence[str], body: Body | None, gate: Gate, parts: Sequence[Part], begun: tuple[int, ...] = ()
) -> Grammar:
    grammars = [{"lark_grammar": "\n".join(rules)}]
    if body is not None:
        grammars.append({"name": "answer", "lark_grammar": body.lark})
    return Grammar(json.dumps({"grammars": grammars}), gate, tuple(parts), begun)


def _parts(body: Body | None) -> list[Part]:
    return [] if body is None else [Part(body.field, LLMatcher.grammar_from_lark(body.lark))]


def _prompted_body(prompt: EncodedPrompt) -> Body | None:
    form = prompt.form
    if form.type == "text":
        return None
    if form.type == "json_object":
        return json_body({"type": "object"}, "response_format")
    assert isinstance(form.schema, Mapping)
    return json_body(form.schema, "response_format.json_schema.schema")


def _begun(prompt: EncodedPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The text of the answer that the prompt already holds: what follows its last tag."""
    ids = prompt.token_ids
    last = max(index for index, token_id in enumerate(ids) if token_id == tokenizer.sep_id)
    return ids[last + 1 :]
