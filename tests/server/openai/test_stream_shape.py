"""The stream of chat completions, line by line of the specification that Moonshot's verifier checks."""

import json
import re

import pytest

from tests.server.conftest import END, MODEL_NAME, THOUGHT, events

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


def call(name, value):
    argument = f'<|open|>argument key="x" type="string"<|sep|>{value}<|close|>argument<|sep|>'
    return f'<|open|>call tool="{name}" index="1"<|sep|>{argument}<|close|>call<|sep|>'


TWO_CALLS = "<|open|>tools<|sep|>" + call("f", "a") + call("g", "你好")
TWO_CALLS += "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
CALLS = THOUGHT + "hello<|close|>response<|sep|>" + TWO_CALLS
# what the model says, and whether it was asked to think
ANSWERS = {
    "thinking": (THOUGHT + "hello 你好🌙" + END, True),
    "calls": (CALLS, True),
    "calls after thinking": ("hm🌙<|close|>think<|sep|>" + TWO_CALLS, True),
    "no thinking": ("hello 你好🌙" + END, False),
    "calls without thinking": ("<|close|>response<|sep|>" + TWO_CALLS, False),
}
THINKING = [name for name, (_, is_thinking) in ANSWERS.items() if is_thinking]


@pytest.fixture(params=ANSWERS)
def talk(request, serve, tokenizer):
    says, is_thinking = ANSWERS[request.param]
    server = serve(says, max_model_len=4096)
    thinking = {"type": "enabled" if is_thinking else "disabled"}

    def ask(**fields):
        return server.chat(tools=TOOLS, thinking=thinking, **fields)

    ask.is_thinking = is_thinking
    ask.token_ids = tokenizer.encode_markup(says)
    return ask


def increments(chunks):
    """The deltas between the first frame and the end of the choice."""
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]][1:-1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_frame_belongs_to_one_choice_that_begins_with_its_role_and_ends_once(talk, n):
    chunks = events(talk(stream=True, n=n))
    of_choice = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert {"index", "delta", "finish_reason"} <= choice.keys()
        of_choice.setdefault(choice["index"], []).append(choice)
    assert sorted(of_choice) == list(range(n))
    for choices in of_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in ("stop", "tool_calls")


def test_every_chunk_says_whose_it_is(talk):
    chunks = events(talk(stream=True, stream_options={"include_usage": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(isinstance(chunk["created"], int) and chunk["model"] == MODEL_NAME for chunk in chunks)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", chunks[0]["id"])


def test_the_role_stands_in_the_first_frame_only(talk):
    chunks = events(talk(stream=True))
    assert chunks[0]["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    assert all("role" not in delta for delta in increments(chunks))


def test_a_frame_holds_one_increment_of_one_kind_that_is_never_null(talk):
    for delta in increments(events(talk(stream=True))):
        ((kind, value),) = delta.items()
        assert kind in ("content", "reasoning_content", "tool_calls")
        assert isinstance(value, list if kind == "tool_calls" else str)
        assert "�" not in json.dumps(delta, ensure_ascii=False)


@pytest.mark.parametrize("talk", THINKING, indirect=True)
def test_an_empty_reasoning_marks_the_end_of_thinking_once(talk):
    kinds = [next(iter(delta.items())) for delta in increments(events(talk(stream=True)))]
    end = kinds.index(("reasoning_content", ""))
    assert kinds.count(("reasoning_content", "")) == 1
    assert {kind for kind, _ in kinds[:end]} == {"reasoning_content"}
    assert "reasoning_content" not in {kind for kind, _ in kinds[end + 1 :]}


def test_a_choice_ends_with_one_empty_delta_and_its_usage(talk):
    chunks = events(talk(stream=True))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["delta"] == {}
    whole = talk().json()
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"][0]["usage"] == whole["usage"]
    assert {"prompt_tokens_details", "completion_tokens_details"} < whole["usage"].keys()
    assert all("usage" not in chunk and "usage" not in chunk["choices"][0] for chunk in chunks[:-1])


def test_a_summary_comes_only_when_asked_for(talk):
    chunks = events(talk(stream=True, stream_options={"include_usage": True}))
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], chunks[-2]["choices"][0]["usage"])
    assert all(chunk["choices"] for chunk in events(talk(stream=True)))


@pytest.mark.parametrize("is_stream", [False, True])
def test_headers_tell_the_counts_of_the_prompt(talk, is_stream):
    answer, usage = talk(stream=is_stream), talk().json()["usage"]
    assert int(answer.headers["X-Msh-Usage-Prompt-Tokens"]) == usage["prompt_tokens"]
    assert int(answer.headers["X-Msh-Usage-Cached-Tokens"]) == usage["prompt_tokens_details"]["cached_tokens"]


def test_every_increment_shows_its_token_ids_when_asked_to(talk):
    deltas = increments(events(talk(stream=True, stream_options={"include_internal_content": True})))
    assert all(delta["internal_content"]["token_ids"] for delta in deltas)
    shown = [token_id for delta in deltas for token_id in delta["internal_content"]["token_ids"]]
    assert shown == talk.token_ids[: len(shown)], "the ids are those that were generated, each once and in order"
    assert all(len(delta) == 2 for delta in deltas)
    assert all("internal_content" not in delta for delta in increments(events(talk(stream=True))))


def test_usage_goes_along_when_asked_to(talk):
    chunks = events(talk(stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"] == chunks[-1]["choices"][0]["usage"] == talk().json()["usage"]
    if not talk.is_thinking:
        assert counts[-1] == 0
        return
    kinds = [next(iter(chunk["choices"][0]["delta"].items()), None) for chunk in chunks]
    assert len(set(counts[kinds.index(("reasoning_content", "")) :])) == 1


def test_logprobs_come_with_the_increments_and_as_many_as_asked_for(talk):
    chunks = events(talk(stream=True, logprobs=True, top_logprobs=3))
    assert "logprobs" not in chunks[0]["choices"][0]
    entries = [
        entry
        for chunk in chunks
        for entries in (chunk["choices"][0].get("logprobs") or {}).values()
        for entry in entries
    ]
    has_text = any(delta.get("content") or delta.get("reasoning_content") for delta in increments(chunks))
    assert bool(entries) == has_text
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    for entry in entries:
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
    assert all("logprobs" not in chunk["choices"][0] for chunk in events(talk(stream=True)))


def test_calls_come_name_first_and_one_after_another(serve):
    chunks = events(serve(CALLS, max_model_len=4096).chat(tools=TOOLS, stream=True))
    parts = [part for delta in increments(chunks) for part in delta.get("tool_calls", [])]
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
    for index, name in enumerate("fg"):
        first, *rest = (part for part in parts if part["index"] == index)
        assert first == {
            "index": index,
            "id": f"{name}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in rest)
        assert list(json.loads("".join(part["function"]["arguments"] for part in rest))) == ["x"]


def test_a_stop_string_is_never_shown(serve):
    chunks = events(serve(THOUGHT + "hello world" + END).chat(stream=True, stop=[" world"]))
    assert "".join(delta.get("content", "") for delta in increments(chunks)) == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_error_before_the_stream_is_no_stream(serve):
    error = serve().chat(stream=True, temperature=-1)
    assert error.status_code == 400
    assert error.headers["content-type"] == "application/json"
    assert {"message", "type"} <= error.json()["error"].keys()


@pytest.mark.parametrize("talk", [name for name in ANSWERS if name not in THINKING], indirect=True)
def test_without_thinking_there_is_no_reasoning_and_no_end_of_it(talk):
    assert all("reasoning_content" not in delta for delta in increments(events(talk(stream=True))))


def test_an_answer_that_is_cut_ends_by_length_also_inside_its_thoughts(serve):
    for says in ("hm🌙hm", THOUGHT + "hello"):
        chunks = events(serve(says).chat(stream=True))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        ends = [delta for delta in increments(chunks) if delta.get("reasoning_content") == ""]
        assert len(ends) == (says != "hm🌙hm")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_answers_of_every_api_have_the_headers(serve, path, prompt, is_stream):
    server = serve(THOUGHT + "hello" + END)
    answer = server.http.post(path, json={"model": MODEL_NAME, "stream": is_stream, **prompt})
    count = len(server.engine.requests[0].prompt_token_ids)
    assert answer.headers["X-Msh-Usage-Prompt-Tokens"] == str(count)
    assert answer.headers["X-Msh-Usage-Cached-Tokens"] == "0"
