"""Answers that other engines were reported to spoil, replayed through each API, streamed and whole."""

import pytest

from tests.server.conftest import MODEL_NAME
from tests.server.replies import APIS, Reply, body_for, read_stream, read_whole

O, C, S = "<|open|>", "<|close|>", "<|sep|>"  # noqa: E741
END = f"{C}message{S}<|end_of_msg|>"
THOUGHT = f"hm{C}think{S}"
TEXT = f"{O}response{S}hello{C}response{S}"
CALL = f'{O}call tool="f" index="1"{S}{O}argument key="x" type="string"{S}a "b"{C}argument{S}{C}call{S}'
TOOLS = f"{O}tools{S}{CALL}{C}tools{S}"
CALLS = [("f", {"x": 'a "b"'})]
DECLARED = [("f", {"type": "object"}), ("g", {"type": "object"})]


@pytest.fixture(scope="module")
def server(serve_for_module):
    return serve_for_module(max_model_len=8192)


@pytest.fixture(params=APIS)
def replay(request, server, tokenizer):
    """Both replies of an API to a request with tools, when the model says this."""

    def run(says, tools=DECLARED, **fields):
        token_ids = tokenizer.encode_markup(says)
        server.script = lambda _: token_ids
        body = {"model": MODEL_NAME, **body_for(request.param, "hello", tools, **fields)}
        whole = server.http.post(request.param, json=body)
        assert whole.status_code == 200, whole.text
        stream = server.http.post(request.param, json={**body, "stream": True}).text
        assert "<|" not in whole.text
        assert "<|" not in stream
        return read_whole(request.param, whole.json()), read_stream(request.param, stream)

    return run


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(f"hm{TOOLS}{END}", id="thinking is not closed"),
        pytest.param(f"hm{C}think{TOOLS}{END}", id="the tag that closes it is not ended"),
        pytest.param(f"{THOUGHT}{CALL}{C}tools{S}{END}", id="tools are not opened"),
        pytest.param(f"{THOUGHT}{O}tools{S}{CALL}<|end_of_msg|>", id="tools are not closed"),
        pytest.param(f"hm{O}response{S}{C}response{S}{TOOLS}{END}", id="the response follows at once"),
    ],
)
def test_a_call_after_a_marker_that_was_skipped_is_made_streamed_and_whole(replay, says):
    expected = Reply("hm", "", CALLS, "tool_calls")
    assert replay(says) == (expected, expected)


@pytest.mark.parametrize(
    "says",
    [
        f"{THOUGHT}{O}response{S}hello<|end_of_msg|>",
        f"{THOUGHT}{O}response{S}hello{C}message{S}<|end_of_msg|>",
        f"{THOUGHT}{O}response{S}hello{C}response{S}<|end_of_msg|>",
        f"{THOUGHT}{O}response{S}hello[EOS]",
    ],
)
def test_the_end_of_a_message_does_not_leak_into_content_where_tools_are_declared(replay, says):
    expected = Reply("hm", "hello", [], "stop")
    assert replay(says) == (expected, expected)


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(f"{THOUGHT}\n{TEXT}\n{TOOLS}\n{END}", id="blanks between channels"),
        pytest.param(f"{THOUGHT}{TEXT}{O}tools{S}\nnow: {CALL} then {C}tools{S}{END}", id="text between calls"),
        pytest.param(f"{THOUGHT}{TEXT}{O}what{S}{C}what{S}{TOOLS}{END}", id="a tag that is not known"),
        pytest.param(f"{THOUGHT}{TEXT}{O}think{S}{C}think{S}{TOOLS}{END}", id="thinking opened again"),
    ],
)
def test_what_stands_between_channels_is_neither_content_nor_reasoning(replay, says):
    expected = Reply("hm", "hello", CALLS, "tool_calls")
    assert replay(says) == (expected, expected)


def test_many_small_tools_are_called_in_one_stream(replay):
    names = [f"tool_{number}" for number in range(20)]
    calls = "".join(f'{O}call tool="{name}" index="{index + 1}"{S}{C}call{S}' for index, name in enumerate(names))
    expected = Reply("hm", "", [(name, {}) for name in names], "tool_calls")
    tools = [(name, {"type": "object"}) for name in names]
    assert replay(f"{THOUGHT}{O}tools{S}{calls}{C}tools{S}{END}", tools) == (expected, expected)


@pytest.mark.parametrize("opened", ["", f"{O}think{S}"])
def test_reasoning_comes_first_although_the_prompt_has_opened_it(replay, opened):
    whole, stream = replay(f"{opened}{THOUGHT}{TEXT}{TOOLS}{END}")
    assert whole == stream == Reply("hm", "hello", CALLS, "tool_calls")
    assert stream.kinds[0] == "reasoning"
    assert stream.kinds == sorted(stream.kinds, key=["reasoning", "content", "calls"].index)
