"""The chat completions dialect."""

import pytest

from tests.server.conftest import END, MAX_MODEL_LEN, MODEL_NAME, THOUGHT, events, joined


def test_an_answer_is_split_into_reasoning_and_content(serve):
    server = serve(THOUGHT + "hello 你好" + END)
    answer = server.chat().json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello 你好", "reasoning_content": "hm🌙"}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    assert answer["id"].startswith("chatcmpl-")
    assert len(answer["id"]) == len("chatcmpl-") + 24


def test_an_answer_without_thinking_has_no_reasoning(server):
    message = server.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello"}


def test_usage_counts_prompt_output_and_reasoning(serve, tokenizer):
    says = THOUGHT + "hello" + END
    server = serve(says)
    usage = server.chat().json()["usage"]
    assert usage["prompt_tokens"] == len(server.engine.requests[0].prompt_token_ids)
    assert usage["completion_tokens"] == len(tokenizer.encode_markup(says))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("hm🌙"))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_says_what_the_whole_answer_says(serve):
    server = serve(THOUGHT + "hello 你好 world" + END)
    whole = server.chat().json()["choices"][0]
    chunks = events(server.chat(stream=True))
    assert joined(chunks, "reasoning_content") == whole["message"]["reasoning_content"]
    assert joined(chunks, "content") == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_stream_has_the_shape_of_the_stream_specification(serve):
    chunks = events(serve(THOUGHT + "hello" + END).chat(stream=True))
    first, *middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert all(len(choice["delta"]) == 1 and choice["finish_reason"] is None for choice in middle)
    shown = [next(iter(choice["delta"].items())) for choice in middle]
    end_of_thinking = shown.index(("reasoning_content", ""))
    assert all(value for _, value in shown[:end_of_thinking])
    assert all(value for _, value in shown[end_of_thinking + 1 :])
    assert {kind for kind, _ in shown[:end_of_thinking]} == {"reasoning_content"}
    assert {kind for kind, _ in shown[end_of_thinking + 1 :]} == {"content"}
    assert last["usage"]["total_tokens"] > 0
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_a_character_of_several_tokens_is_never_cut(serve, tokenizer):
    moon = list("🌙".encode())
    assert all(tokenizer.token_bytes(token_id) == bytes([token_id]) for token_id in moon)
    server = serve(lambda request: moon + tokenizer.encode_markup(END))
    chunks = events(server.chat(stream=True, reasoning_effort="none"))
    assert joined(chunks, "content") == "🌙"
    assert "\ufffd" not in server.chat(reasoning_effort="none").text


def test_the_usage_comes_last_when_asked_for(serve):
    server = serve(THOUGHT + "hello" + END)
    chunks = events(server.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.chat().json()["usage"]


def test_several_choices_are_each_complete(serve, tokenizer):
    words = {0: "hello", 1: "你好", 2: " world"}
    server = serve(lambda request: tokenizer.encode_markup(words[int(request.request_id.rpartition("-")[2])] + END))
    whole = server.chat(n=3, reasoning_effort="none").json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == list(words.values())
    assert whole["usage"]["prompt_tokens"] == len(server.engine.requests[0].prompt_token_ids)
    chunks = events(server.chat(n=3, reasoning_effort="none", stream=True))
    assert [joined(chunks, "content", index) for index in words] == list(words.values())
    finished = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(finished) == list(words)


def test_choices_with_a_seed_draw_from_seeds_of_their_own(server):
    server.chat(n=3, seed=7)
    server.chat(n=2)
    server.chat(n=2, seed=2**63 - 1)
    assert [request.params.seed for request in server.engine.requests] == [7, 8, 9, None, None, 2**63 - 1, -(2**63)]


def test_a_stop_string_ends_the_text_and_is_not_shown(serve):
    server = serve("hello wor" + "ld and more" + END)
    for stop in ("wor", ["xyz", "wor"]):
        choice = server.chat(stop=stop, reasoning_effort="none").json()["choices"][0]
        assert choice["message"]["content"] == "hello "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wor")
        chunks = events(server.chat(stop=stop, reasoning_effort="none", stream=True))
        assert joined(chunks, "content") == "hello "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_in_the_reasoning_is_nothing_special(serve):
    message = serve(THOUGHT + "hello" + END).chat(stop="hm").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm🌙", "hello")


def test_a_cut_answer_ends_by_length(serve):
    server = serve(THOUGHT + "hello" + END)
    for name in ("max_tokens", "max_completion_tokens"):
        choice = server.chat(**{name: 1}).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning_content"]


def test_an_answer_that_skips_thinking_is_content(serve):
    server = serve("hello" + END)
    answer = server.chat(logprobs=True).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("", "hello")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["content"]
    assert joined(events(server.chat(stream=True)), "content") == "hello"


def test_an_answer_that_skips_thinking_may_begin_with_its_stop_string(serve):
    server = serve("hello world" + END)
    answer = server.chat(stop=["hell"]).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("", "")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    chunks = events(server.chat(stop=["hell"], stream=True))
    assert all(value for chunk in chunks[1:-2] for value in chunk["choices"][0]["delta"].values())
    assert chunks[-2]["choices"][0]["delta"] == {"reasoning_content": ""}


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_have_one_entry_per_token_of_the_response(serve, tokenizer, num_top):
    server = serve(THOUGHT + "hello 你好" + END)
    fields = {"logprobs": True, "top_logprobs": num_top}
    whole = server.chat(**fields).json()["choices"][0]["logprobs"]
    expected = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("hello 你好")]
    assert [bytes(entry["bytes"]) for entry in whole["content"]] == expected
    assert all(len(entry["top_logprobs"]) == num_top for entry in whole["content"])
    assert len(whole["reasoning_content"]) == len(tokenizer.encode("hm🌙"))
    chunks = events(server.chat(stream=True, **fields))
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if "logprobs" in choice]
    assert [entry for item in streamed for entry in item["content"]] == whole["content"]
    assert "logprobs" not in chunks[0]["choices"][0]


def test_no_logprobs_unless_asked_for(server):
    assert server.chat().json()["choices"][0]["logprobs"] is None


def test_sampling_defaults_are_those_of_the_model(server):
    server.chat()
    server.chat(temperature=0, top_p=0.5, top_k=4, min_p=0.1, presence_penalty=1, logit_bias={"65": -5}, stop=None)
    default, given = (request.params for request in server.engine.requests)
    assert (default.temperature, default.top_p, default.max_tokens, default.seed) == (1.0, 0.95, None, None)
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.presence_penalty) == (0, 0.5, 4, 0.1, 1)
    assert given.logit_bias == {65: -5}


def test_the_whole_answer_can_be_sent_back(serve):
    server = serve(THOUGHT + "hello" + END)
    message = server.chat().json()["choices"][0]["message"]
    turns = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
    assert server.chat(messages=turns).status_code == 200
    with_nulls = {**message, "refusal": None, "annotations": [], "tool_calls": None, "function_call": None}
    assert server.chat(messages=[turns[0], with_nulls, turns[2]]).status_code == 200
    first, second = server.engine.requests[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_prompt_over_the_context_is_refused_with_the_code_clients_know(server):
    error = server.chat("x" * (2 * MAX_MODEL_LEN)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(MAX_MODEL_LEN) in error["message"]
    error = server.chat(max_tokens=MAX_MODEL_LEN).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert server.chat().status_code == 200


def test_values_that_ask_for_nothing_may_be_sent(serve):
    server = serve()
    assert server.chat(top_k=-1, verbosity="medium", functions=[], audio=None).status_code == 200
    assert server.engine.requests[0].params.top_k == 0
    assert server.chat(verbosity="low").json()["error"]["param"] == "verbosity"
    assert server.chat(top_k=-2).json()["error"]["param"] == "top_k"
