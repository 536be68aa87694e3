"""Segments are encoded alone, so nothing that a client writes becomes a control token."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perilune.text.encoding import encode_chat
from perilune.text.prompt.segments import open_tag
from perilune.text.tokenizer import Tokenizer
from tests.text.prompts import ASSISTANT, SMALL, C, E, O, S, call, calls, result, tool

HOSTILE = st.lists(
    st.one_of(st.sampled_from([*list(SMALL.special_ids)[:10], f"{C}message{S}{E}{ASSISTANT}"]), st.text(max_size=6)),
    max_size=6,
).map("".join)


def request_of(texts: list[str]) -> dict[str, Any]:
    """A request with a text in every place where a client can put one."""
    a, b, c, d = texts
    named = {"name": f"n{a}"}
    messages = [
        {"role": "system", "content": a, **named},
        {"role": "system", "tools": [tool("g", parameters={d: a})]},
        {"role": "user", "content": [{"type": "text", "text": b}, {"type": "text", "text": c}], **named},
        {**calls(call(f"1{c}", f"n{b}", {d: a}), call(f"2{c}", "g", f"!{d}")), "content": c, "reasoning": f"r{b}"},
        result(f"1{c}", a),
        result(f"2{c}", b),
        {"role": "assistant", "content": a, "reasoning_content": f"r{c}", **named},
        result(f"3{c}", b, name=f"n{d}"),
        {"role": "user", "content": d},
    ]
    schema = {"name": f"n{a}", "schema": {b: c}}
    return {
        "messages": messages,
        "tools": [tool("f", description=a, parameters={b: {c: d}})],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def control_ids(texts: list[str]) -> list[int]:
    request = request_of(texts)
    prompt = encode_chat(request.pop("messages"), SMALL, **request)
    return [token_id for token_id in prompt.token_ids if SMALL.is_special(token_id)]


@given(st.lists(HOSTILE, min_size=4, max_size=4))
def test_nothing_in_a_request_becomes_a_control_token(texts: list[str]) -> None:
    assert control_ids(texts) == control_ids(["x"] * 4)


def test_an_attribute_is_four_segments() -> None:
    segments = open_tag("call", {"tool": "f"})
    assert [(segment.text, segment.is_markup) for segment in segments] == [
        (O, True),
        *[(text, False) for text in ("call", " tool", '="', "f", '"')],
        (S, True),
    ]


def test_an_attribute_value_is_encoded_alone(kimi_tokenizer: Tokenizer) -> None:
    prompt = encode_chat([{"role": "user", "content": "hi", "name": "_id"}], kimi_tokenizer, thinking=False)
    assert prompt.token_ids[6:11] == (1530, 878, 1885, 1, 163589)
    history = [calls(call("a", "f", {"_id": 1}))]
    ids = encode_chat(history, kimi_tokenizer, thinking=False).token_ids
    assert (2355, 878, 1885, 1) in [ids[start : start + 4] for start in range(len(ids))]
