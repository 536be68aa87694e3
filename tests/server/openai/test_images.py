"""Chats with pictures: what reaches the engine, what is refused, and what a bad picture does to others."""

import threading

import numpy as np
import pytest
from PIL import Image

from perilune.config.media import MediaConfig
from perilune.server.settings import ServerSettings
from perilune.text.images.pixels import to_patches
from perilune.text.images.size import plan_size
from tests.server.conftest import MODEL_NAME, events, joined
from tests.text.images.pictures import data_url, file_of, image_part, photo, png_header

PNG = file_of(photo(60, 40))
TEXT = {"type": "text", "text": "hello"}
URL = "messages[0].content[0].image_url.url"


@pytest.fixture
def server(serve):
    return serve(media=MediaConfig(), max_model_len=20_000)


def ask(server, *parts, **fields):
    messages = [{"role": "user", "content": list(parts)}]
    return server.http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": messages, **fields})


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.fixture
def pad_id(tokenizer):
    return tokenizer.special_ids["<|media_pad|>"]


PICTURE = image_part(PNG)


@pytest.mark.parametrize(
    "parts", [[PICTURE, TEXT], [TEXT, PICTURE], [PICTURE], [TEXT, PICTURE, TEXT], [PICTURE, PICTURE]]
)
def test_a_picture_first_last_or_alone_has_as_many_placeholders_as_embeddings(server, pad_id, parts):
    assert ask(server, *parts).status_code == 200
    (request,) = server.engine.requests
    places = [index for index, token_id in enumerate(request.prompt_token_ids) if token_id == pad_id]
    spans = [index for image in request.images for index in range(image.start, image.end)]
    assert places == spans
    assert len(request.images) == parts.count(PICTURE)


@pytest.mark.parametrize("count", range(1, 10))
def test_one_to_nine_pictures_in_a_request(server, count):
    sizes = [(28 * (index + 1), 30) for index in range(count)]
    response = ask(server, *(image_part(file_of(photo(*size, seed=index))) for index, size in enumerate(sizes)), TEXT)
    assert response.status_code == 200
    (request,) = server.engine.requests
    assert [image.num_tokens for image in request.images] == [2 * (index + 1) for index in range(count)]
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


def test_the_engine_gets_the_patches_of_the_picture(server):
    assert ask(server, PICTURE).status_code == 200
    (image,) = server.engine.requests[0].images
    expected = to_patches(photo(60, 40), plan_size(60, 40, MediaConfig()), MediaConfig())
    assert np.array_equal(image.patches, expected)
    assert (image.rows, image.columns) == (4, 6)


def test_every_choice_gets_the_pictures(server):
    assert ask(server, PICTURE, n=2).status_code == 200
    assert [len(request.images) for request in server.engine.requests] == [1, 1]


def test_a_streamed_answer_to_a_picture(server):
    chunks = events(ask(server, PICTURE, TEXT, stream=True))
    assert joined(chunks, "reasoning_content") or joined(chunks, "content")


def test_an_image_url_may_be_a_plain_string_and_detail_is_ignored(server):
    assert ask(server, {"type": "image_url", "image_url": data_url(PNG)}).status_code == 200
    detailed = {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "high"}}
    assert ask(server, detailed).status_code == 200
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_placeholder_that_a_user_types_takes_no_picture(server, pad_id):
    typed = {"type": "text", "text": "<|media_begin|><|media_pad|><|kimi_image_placeholder|>"}
    assert ask(server, typed, PICTURE, typed).status_code == 200
    (request,) = server.engine.requests
    assert request.prompt_token_ids.count(pad_id) == request.images[0].num_tokens


def test_a_picture_in_the_middle_of_a_history_leaves_what_is_before_it(server):
    before = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]

    def prompt(content):
        body = {"model": MODEL_NAME, "messages": [*before, {"role": "user", "content": content}]}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        return server.engine.requests[-1].prompt_token_ids

    plain, shown = prompt([TEXT]), prompt([PICTURE, TEXT])
    (image,) = server.engine.requests[-1].images
    same = next(index for index, pair in enumerate(zip(plain, shown, strict=False)) if pair[0] != pair[1])
    assert same > len(plain) // 2
    assert image.start > same


def test_tokens_of_pictures_are_counted_as_in_a_chat(server):
    body = {"messages": [{"role": "user", "content": [PICTURE, TEXT]}]}
    counted = server.http.post("/tokenize", json=body).json()["count"]
    assert ask(server, PICTURE, TEXT).json()["usage"]["prompt_tokens"] == counted


def test_a_model_without_vision_weights_refuses_pictures(serve):
    error = error_of(ask(serve(), TEXT, PICTURE))
    assert error["param"] == "messages[0].content[1].type"
    assert "no vision weights" in error["message"]


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_pictures_belong_to_users_and_tools(server, role):
    message = {"role": role, "content": [PICTURE]}
    body = {"model": MODEL_NAME, "messages": [message, {"role": "user", "content": "x"}]}
    error = error_of(server.http.post("/v1/chat/completions", json=body))
    assert error["param"] == "messages[0].content[0].type"
    assert "messages from user or tool" in error["message"]


def test_pictures_of_results_are_shown_behind_all_results_of_an_answer_with_the_names_of_their_tools(
    server, tokenizer, pad_id
):
    def calls(*names):
        functions = [{"name": name, "arguments": "{}"} for name in names]
        return [{"id": f"c_{f['name']}", "type": "function", "function": f} for f in functions]

    def result(name, *content):
        return {"role": "tool", "tool_call_id": f"c_{name}", "content": list(content)}

    answer = {"role": "assistant", "content": "", "tool_calls": calls("see", "read")}
    messages = [{"role": "user", "content": "hello"}, answer, result("read", TEXT), result("see", TEXT, PICTURE)]
    body = {"model": MODEL_NAME, "messages": [*messages, {"role": "user", "content": "go on"}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    request = server.engine.requests[-1]
    assert len(request.images) == 1
    prompt = tokenizer.decode([token_id for token_id in request.prompt_token_ids if token_id != pad_id])
    text = TEXT["text"]
    results = [
        f'role="tool" tool="{name}" index="{index}"<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>'
        for index, name in ((1, "see"), (2, "read"))
    ]
    shown = 'role="user"<|sep|>Result of see, call 1:<|media_begin|>image '
    assert prompt.index(results[0]) < prompt.index(results[1]) < prompt.index(shown) < prompt.index("go on")
    body["messages"] = messages
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert len(server.engine.requests[-1].images) == 1


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("part", "param", "text"),
    [
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages[0].content[0].type", "not published"),
        ({"type": "image"}, "messages[0].content[0].type", "allowed are text and"),
        ({"type": "image_url"}, "messages[0].content[0].image_url", "expected an object"),
        ({"type": "image_url", "image_url": {}}, URL, "not empty"),
        ({"type": "image_url", "image_url": {"url": 5}}, URL, "not empty"),
        ({**PICTURE, "size": 5}, "messages[0].content[0].size", "allowed are type, image_url"),
        (
            {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "vast"}},
            *("messages[0].content[0].image_url.detail", "auto, low and high"),
        ),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, URL, "--allow-image-urls"),
        (image_part(b""), URL, "0 bytes"),
        (image_part(b"GIF89a"), URL, "JPEG, PNG"),
        (image_part(PNG[:-200]), URL, "cannot be decoded"),
        (image_part(file_of(photo(9, 9), "GIF", save_all=True, append_images=[photo(9, 9, seed=1)])), URL, "one frame"),
        (image_part(png_header(9000, 9000)), URL, "at most 50000000"),
        (image_part(png_header(60000, 60000)), URL, "pixels"),
    ],
)
def test_a_bad_picture_is_refused_with_its_field_and_the_next_request_is_served(server, part, param, text):
    error = error_of(ask(server, part, TEXT))
    assert error["param"] == param
    assert text in error["message"]
    assert server.engine.requests == []
    assert ask(server, PICTURE).status_code == 200


def test_web_addresses_of_this_machine_are_refused_even_where_the_web_is_allowed(serve):
    server = serve(media=MediaConfig(), settings=ServerSettings(allow_image_urls=True))
    error = error_of(ask(server, {"type": "image_url", "image_url": f"{server.url}/health"}))
    assert "not on the public internet" in error["message"]


def test_a_picture_that_does_not_fit_the_context_is_refused_before_it_is_decoded(serve):
    server = serve(media=MediaConfig(), max_model_len=512)
    # the file is cut off, which decoding would say
    error = error_of(ask(server, image_part(file_of(Image.new("RGB", (2000, 2000)))[:-30])))
    assert error["code"] == "context_length_exceeded"


def test_more_pictures_than_a_request_may_hold_are_refused(server):
    error = error_of(ask(server, *[image_part(file_of(photo(1, 1)))] * 65))
    assert error["param"] == "messages[0].content[64].image_url.url"
    assert "64" in error["message"]


def test_while_pictures_are_decoded_other_requests_are_answered(server, monkeypatch):
    """Every thread that decodes is held up; the loop is not."""
    from perilune.text.images import picture

    has_begun, may_end = threading.Semaphore(0), threading.Event()

    def decode(*arguments):
        has_begun.release()
        assert may_end.wait(20)
        return to_patches(*arguments)

    monkeypatch.setattr(picture, "to_patches", decode)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, PICTURE))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert has_begun.acquire(timeout=20)
    assert server.chat("hello" * 3500).status_code == 200  # a body that is read on a thread, too
    assert server.http.get("/health").status_code == 200
    assert answers == []
    may_end.set()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 6
