"""The completions dialect."""

import pytest

from perilune.engine.fake import FAKE_LOGPROB
from tests.server.conftest import MAX_MODEL_LEN, events

EOM = "<|end_of_msg|>"


def text_of(chunks, index=0):
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def test_a_prompt_is_continued(serve, tokenizer):
    server = serve("hello 你好" + EOM)
    answer = server.complete("user").json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "hello 你好"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert list(server.engine.requests[0].prompt_token_ids) == tokenizer.encode("user")
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode("user"))


def test_names_of_control_tokens_in_a_raw_prompt_are_control_tokens(serve, tokenizer):
    server = serve(EOM)
    server.complete("<|open|>message<|sep|>")
    assert server.engine.requests[0].prompt_token_ids[0] == tokenizer.open_id


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("AB", [(65, 66)]), (["A", "B"], [(65,), (66,)]), ([65, 66], [(65, 66)]), ([[65], [66, 67]], [(65,), (66, 67)])],
)
def test_a_prompt_may_be_texts_or_token_ids(serve, prompt, expected):
    server = serve("hello" + EOM)
    answer = server.complete(prompt).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_are_ordered_by_prompt_then_by_n(serve):
    server = serve(lambda request: [request.prompt_token_ids[0], 97 + int(request.request_id.rpartition("-")[2])])
    answer = server.complete(["A", "B"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Aa", "Ab", "Bc", "Bd"]
    chunks = events(server.complete(["A", "B"], n=2, stream=True))
    assert [text_of(chunks, index) for index in range(4)] == ["Aa", "Ab", "Bc", "Bd"]
    assert answer["usage"]["prompt_tokens"] == 2


def test_a_stream_says_what_the_whole_answer_says(serve):
    server = serve("hello 你好 world" + EOM)
    fields = {"echo": True, "logprobs": 2, "stop": " wor"}
    whole = server.complete("user", **fields).json()
    chunks = events(server.complete("user", stream=True, stream_options={"include_usage": True}, **fields))
    assert text_of(chunks) == whole["choices"][0]["text"] == "userhello 你好"
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    for field, entries in whole["choices"][0]["logprobs"].items():
        assert [entry for part in parts for entry in part[field]] == entries
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_default_length_is_that_of_the_api(serve):
    server = serve("hello" * 20)
    server.complete()
    assert server.engine.requests[0].params.max_tokens == 16


def test_echo_gives_the_prompt_with_its_logprobs(serve, tokenizer):
    server = serve(" world" + EOM)
    choice = server.complete("x你🌙", echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "x你🌙 world"
    token_ids = tokenizer.encode("x你🌙") + tokenizer.encode_markup(" world" + EOM)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[FAKE_LOGPROB] * (len(token_ids) - 1)]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(token_ids)
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-2:] == [len("x你🌙"), len("x你🌙 world")]


def test_echo_without_logprobs_asks_the_engine_for_none(serve):
    server = serve(" world" + EOM)
    assert server.complete([104, 105], echo=True).json()["choices"][0]["text"] == "hi world"
    assert server.engine.requests[0].params.prompt_logprobs is None


def test_no_tokens_may_be_asked_for_to_score_a_prompt(serve):
    server = serve("zz" + EOM)
    answer = server.complete("AB", echo=True, max_tokens=0, logprobs=0).json()
    assert answer["choices"][0]["text"] == "AB"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["A", "B"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_tokens_that_are_no_text_of_their_own_stay_distinct(serve):
    server = serve(lambda request: [*"🌙".encode()])
    logprobs = server.complete(logprobs=0, max_tokens=4).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["\\xf0", "\\x9f", "\\x8c", "\\x99"]
    assert logprobs["text_offset"] == [0, 0, 0, 0]


def test_a_prompt_over_the_context_is_refused(serve):
    server = serve("hello" + EOM)
    error = server.complete([65] * MAX_MODEL_LEN).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert server.complete([65] * (MAX_MODEL_LEN - 16)).status_code == 200


def test_token_ids_are_told_when_asked_for_also_of_half_a_character(serve, tokenizer):
    ids = tokenizer.encode("A🌓")[:-1]
    assert tokenizer.decode(ids).endswith("\ufffd")
    server = serve(lambda request: ids)
    prompt = tokenizer.encode("hello")
    whole = server.complete("hello", return_token_ids=True).json()["choices"][0]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (ids, prompt)
    chunks = [chunk["choices"][0] for chunk in events(server.complete("hello", return_token_ids=True, stream=True))]
    assert [chunk["token_ids"] for chunk in chunks] == [[token_id] for token_id in ids]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(ids) - 1)]
    assert "token_ids" not in server.complete("hello").json()["choices"][0]


def test_a_token_generated_only_to_score_the_prompt_has_no_id(serve):
    server = serve(EOM)
    answer = server.complete("hello", max_tokens=0, echo=True, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == []


def test_raw_text_shows_the_markers_of_the_format_and_stop_strings_see_them(serve):
    says = "hello<|close|>response<|sep|>" + EOM
    assert serve(says).complete().json()["choices"][0]["text"] == "hello<|close|>response<|sep|>"
    choice = serve(says).complete(stop=["<|close|>"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", "<|close|>")


@pytest.mark.parametrize("says", [" world", "<|close|>", EOM])
def test_a_scored_prompt_has_one_more_entry_for_the_token_that_was_generated(serve, tokenizer, says):
    """Clients that score prompts with max_tokens 1 drop the last entry, whatever token it is."""
    server = serve(says)
    choice = server.complete("x你🌙", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    token_ids = tokenizer.encode("x你🌙") + tokenizer.encode_markup(says)[:1]
    logprobs = choice["logprobs"]
    assert {name: len(entries) for name, entries in logprobs.items()} == dict.fromkeys(logprobs, len(token_ids))
    assert logprobs["text_offset"][-1] == len("x你🌙")


def test_offsets_are_those_of_the_text_that_is_shown(serve, tokenizer):
    server = serve("[UNK]a<|close|>b[UNK]c" + EOM)
    choice = server.complete("x<|open|>[UNK]", echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == "x<|open|>[UNK]a<|close|>bc"
    offsets = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert {token: choice["text"][offset:][: len(token)] for token, offset in offsets.items() if token in "abcx"} == {
        token: token for token in "xabc"
    }
    assert offsets["<|close|>"] == choice["text"].index("<|close|>")
