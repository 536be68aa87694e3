"""Whatever JSON a request is made of, it is encoded or refused with the field's name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.text.encoding import encode_chat
from perilune.text.prompt.fields import shown
from tests.text.prompts import SMALL

KEYS = ("role", "content", "name", "tools", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "text")
WORDS = ("system", "user", "assistant", "tool", "function", "f", "text", "required", "json_schema", "{}", "", "\ud800")
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from((*KEYS, "json_schema", "schema", "parameters", "partial", "reasoning")), inner, max_size=5
        ),
    ),
    max_leaves=12,
)
CALLS = st.fixed_dictionaries({"id": JSON, "function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
TOOLS = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": JSON})})
MESSAGES = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant", "tool"))},
        optional={
            "content": JSON,
            "name": JSON,
            "tools": st.one_of(JSON, st.lists(TOOLS, max_size=2)),
            "tool_calls": st.one_of(JSON, st.lists(CALLS, max_size=2)),
            "tool_call_id": JSON,
        },
    ),
)


@given(st.lists(MESSAGES, max_size=4), st.one_of(st.none(), JSON, st.lists(TOOLS)), JSON, JSON)
def test_any_json_is_encoded_or_refused(messages: Any, tools: Any, choice: Any, form: Any) -> None:
    refusal = None
    try:
        encode_chat(messages, SMALL, tools=tools, tool_choice=choice, response_format=form)
    except RequestError as error:
        refusal = error
    assert refusal is None or (refusal.param and str(refusal).startswith(refusal.param))


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "'x'"), (None, "None"), ("x" * 200, "'" + "x" * 79 + "..."), (10**5000, "some int")],
    ids=["text", "null", "long", "huge"],
)
def test_a_wrong_value_is_shown_briefly(value: Any, text: str) -> None:
    assert shown(value) == text
