"""Which answers the grammar of a chat takes, token by token."""

import pytest

from perilune.grammar.answer import chat_grammar, choice_body, json_body, lark_body, regex_body
from perilune.text.encoding import encode_chat
from tests.grammar.conftest import (
    END,
    END_RESPONSE,
    END_TOOLS,
    OPEN_RESPONSE,
    OPEN_TOOLS,
    THINK_END,
    USER,
    call,
    mask_of,
    refused,
    tool,
)

FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG}}
JSON = '{"on": true}'
LAMP = tool("lamp", FLAG)
CALL = call("lamp", ("on", "boolean", "true"))


@pytest.mark.parametrize(
    "thought",
    [
        f"hm <b> {{}}{THINK_END}{OPEN_RESPONSE}",
        f"{OPEN_RESPONSE}",
        f"hm{OPEN_RESPONSE}",
        f"<|open|>think<|sep|>hm{THINK_END}{OPEN_RESPONSE}",
        f"\xff� anything <|media_pad|> at all{THINK_END}{OPEN_RESPONSE}",
    ],
)
def test_the_reasoning_is_free_and_the_grammar_holds_however_it_ends(follow, thought):
    assert follow(thought + JSON + END_RESPONSE + END, response_format=FORM) is None
    assert follow(thought + '{"on": 1', response_format=FORM) == "refused b'1'"
    assert follow(thought + "Sure", response_format=FORM) == "refused b'S'"


def test_an_answer_that_must_come_cannot_end_inside_the_reasoning(follow):
    assert follow("hm<|end_of_msg|>", response_format=FORM) == "refused b'<|end_of_msg|>'"


def test_without_thinking_the_grammar_holds_from_the_first_token(follow):
    assert follow(JSON + END_RESPONSE + END, response_format=FORM, thinking=False) is None
    assert follow("S", response_format=FORM, thinking=False) == "refused b'S'"
    assert follow(JSON + "<|end_of_msg|>", response_format=FORM, thinking=False) == "refused b'<|end_of_msg|>'"


def test_a_beginning_that_the_client_wrote_belongs_to_the_answer(follow):
    begun = {"role": "assistant", "content": '{"on": ', "partial": True}
    messages = (USER, begun)
    assert follow("false}" + END_RESPONSE + END, messages=messages, response_format=FORM) is None
    assert follow("1", messages=messages, response_format=FORM) == "refused b'1'"
    wrong = (USER, {**begun, "content": "Sure"})
    error = refused(lambda: follow("", messages=wrong, response_format=FORM))
    assert error.param == "messages"
    assert "does not fit response_format.json_schema.schema" in str(error)


def test_json_object_takes_any_object_and_nothing_else(follow):
    form = {"type": "json_object"}
    for text in ("{}", '{"a": [1, null, {"b": "\\n"}], "c": -1.5}'):
        assert follow(text + END_RESPONSE + END, response_format=form, thinking=False) is None
    for text in ("[]", "1", '{"a": 1e999}', "{  }", "{\n}"):
        assert follow(text, response_format=form, thinking=False) is not None


@pytest.mark.parametrize(
    ("body", "taken", "not_taken"),
    [
        (regex_body(r"[a-c]{2}-\d+/x", "r"), "ab-12/x", "ad"),
        (choice_body(["yes", 'no "never"', "ñ"], "c"), 'no "never"', "na"),
        (lark_body('start: "<" NAME ">"\nNAME: /[a-z]+/', "g"), "<ab>", "<1"),
        (json_body(True, "j"), '["x", 1]', "x"),
    ],
)
def test_other_forms_hold_for_the_text_of_the_answer(follow, body, taken, not_taken):
    assert follow(f"hm{THINK_END}{OPEN_RESPONSE}{taken}{END_RESPONSE}{END}", body=body) is None
    assert follow(f"hm{THINK_END}{OPEN_RESPONSE}{not_taken}", body=body) is not None


def test_thousands_of_texts_to_choose_from_can_be_followed(follow):
    choices = [f"{number:04}" for number in range(8192)]
    start = f"hm{THINK_END}{OPEN_RESPONSE}"
    for text in ("0000", "4711", "8191"):
        assert follow(start + text + END_RESPONSE + END, body=choice_body(choices, "c")) is None
    assert follow(start + "8192", body=choice_body(choices, "c")) is not None
    picked = tool("f", {"type": "object", "properties": {"k": {"enum": choices}}, "required": ["k"]})
    for text, is_taken in (("4711", True), ("9000", False)):
        answer = f"{THINK_END}{OPEN_TOOLS}{call('f', ('k', 'string', text))}{END_TOOLS}"
        assert (follow(answer, tools=[picked], tool_choice="required") is None) is is_taken


def test_required_demands_a_call_and_named_a_call_of_that_tool(follow):
    tools = [LAMP, tool("other", {"type": "object", "properties": {}})]
    for start in (f"hm{THINK_END}{OPEN_TOOLS}", f"hm{THINK_END}{OPEN_RESPONSE}I will.{END_RESPONSE}{OPEN_TOOLS}"):
        assert follow(start + CALL + END_TOOLS, tools=tools, tool_choice="required") is None
        assert follow(start + call("other") + END_TOOLS, tools=tools, tool_choice="required") is None
        assert follow(start + call("third"), tools=tools, tool_choice="required") is not None
        assert follow(start + "<|close|>", tools=tools, tool_choice="required") == "refused b'<|close|>'"
    named = {"type": "function", "function": {"name": "lamp"}}
    assert follow(f"hm{THINK_END}{OPEN_TOOLS}{CALL}{END_TOOLS}", tools=tools, tool_choice=named) is None
    assert follow(f"hm{THINK_END}{OPEN_TOOLS}{call('other')}", tools=tools, tool_choice=named) is not None
    no_call = f"hm{THINK_END}{OPEN_RESPONSE}No.{END_RESPONSE}<|close|>"
    assert follow(no_call, tools=tools, tool_choice="required") == "refused b'<|close|>'"


def test_required_with_thinking_off_and_nothing_but_a_skipped_response(follow):
    text = f"{END_RESPONSE}{OPEN_TOOLS}{CALL}{END_TOOLS}"
    assert follow(text, tools=[LAMP], tool_choice="required", thinking=False) is None


def test_parallel_tool_calls_false_ends_after_one_call(follow):
    second = call("lamp", ("on", "boolean", "false"), index=2)
    two = f"hm{THINK_END}{OPEN_TOOLS}{CALL}<|close|>call<|sep|>{second}{END_TOOLS}"
    assert follow(two, tools=[LAMP], tool_choice="required") is None
    assert follow(two, tools=[LAMP], tool_choice="required", parallel_calls=False) == "refused b'<|open|>'"
    assert follow(two, tools=[LAMP], parallel_calls=False) == "refused b'<|open|>'", "also where no call is demanded"


def test_strict_tools_are_held_to_their_schema_where_a_call_is_the_models_choice(follow):
    strict = tool("lamp", FLAG, strict=True)
    answer = f"hm{THINK_END}{OPEN_RESPONSE}Just text.{END_RESPONSE}{END}"
    assert follow(answer, tools=[strict]) is None
    start = f"hm{THINK_END}{OPEN_RESPONSE}I will.{END_RESPONSE}{OPEN_TOOLS}"
    assert follow(start + CALL + END_TOOLS, tools=[strict]) is None
    assert follow(start + call("lamp", ("on", "number", "1")), tools=[strict]) is not None


def test_nothing_is_constrained_where_nothing_is_demanded(tokenizer):
    for fields in ({}, {"tools": [LAMP]}, {"tools": [tool("f", FLAG, strict=True)], "tool_choice": "none"}):
        prompt = encode_chat([USER], tokenizer, **fields)
        assert chat_grammar(prompt, tokenizer, None) is None


def test_json_and_calls_in_one_answer(follow):
    fields = {"tools": [LAMP], "response_format": FORM}
    json_only = f"{THINK_END}{OPEN_RESPONSE}{JSON}{END_RESPONSE}"
    assert follow(json_only + END, **fields) is None
    assert follow(json_only + OPEN_TOOLS + call("lamp", ("whatever", "string", "x")) + END_TOOLS, **fields) is None
    assert follow(f"{THINK_END}{OPEN_TOOLS}{CALL}{END_TOOLS}", **fields) is None
    assert follow(f"{THINK_END}{OPEN_RESPONSE}text", **fields) is not None


def test_control_tokens_stand_by_id_and_text_that_spells_them_is_text(follow, tokenizer, compiler):
    echo = tool("echo", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    opened = THINK_END + OPEN_TOOLS + call("echo") + '<|open|>argument key="text" type="string"<|sep|>'
    prompt = encode_chat([USER], tokenizer, tools=[echo], tool_choice="required")
    state = compiler.compile(chat_grammar(prompt, tokenizer, None))
    for token_id in (*tokenizer.encode_markup(opened), *tokenizer.encode("<|close|>argument<|sep|>")):
        state.advance(token_id)
    assert state.error is None
    allowed = mask_of(state, compiler)
    assert allowed[tokenizer.close_id // 8] >> tokenizer.close_id % 8 & 1
    assert not allowed[tokenizer.sep_id // 8] >> tokenizer.sep_id % 8 & 1
    padding = compiler.vocab_size - 1
    assert not allowed[padding // 8] >> padding % 8 & 1, "ids past the tokenizer's are never allowed"
