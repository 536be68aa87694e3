"""Decoding of pictures: who waits for whom, and how many bytes there may be."""

import asyncio
import gc
import threading

import numpy as np
import pytest
from PIL import Image

from perilune.config.media import MediaConfig
from perilune.errors import RequestError
from perilune.server.reading.pictures import LARGE_PIXELS, PictureDecoder
from perilune.server.settings import ServerSettings
from perilune.text.images.picture import ImageLimits, open_picture
from perilune.text.images.pixels import to_patches
from perilune.text.prompt.segments import PlacedPicture
from tests.server.conftest import END, MODEL_NAME
from tests.text.images.pictures import data_url, file_of, image_part, photo, png_header

SMALL = file_of(photo(60, 40))
LARGE = file_of(Image.new("RGB", (3000, LARGE_PIXELS // 3000 + 1)))
PATCH_BYTES = 588
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
TEXT = {
    "/v1/chat/completions": {"type": "text", "text": "hello"},
    "/v1/responses": {"type": "input_text", "text": "hello"},
    "/v1/messages": {"type": "text", "text": "hello"},
}


def placed(data, start=0):
    return PlacedPicture(start, open_picture(data, "field", MediaConfig(), ImageLimits()))


def part(path, data):
    """One part of a message as each API writes it: a picture, or for None the text hello."""
    if data is None:
        return TEXT[path]
    if path == "/v1/responses":
        return {"type": "input_image", "image_url": data_url(data)}
    if path == "/v1/messages":
        payload = data_url(data).removeprefix("data:image/png;base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": payload}}
    return image_part(data)


def ask(server, *files, path="/v1/chat/completions"):
    turns = [{"role": "user", "content": [part(path, data) for data in files]}]
    body = {"model": MODEL_NAME, "max_tokens": 9, "messages": turns}
    if path == "/v1/responses":
        body = {"model": MODEL_NAME, "input": turns}
    return server.http.post(path, json=body)


@pytest.fixture
def held(monkeypatch):
    """Decoding of large pictures stops until the event is set; the semaphore counts those that have begun."""
    from perilune.text.images import picture

    may_go_on, begun = threading.Event(), threading.Semaphore(0)

    def decode(image, size, config):
        if image.width * image.height > LARGE_PIXELS:
            begun.release()
            assert may_go_on.wait(20)
        return to_patches(image, size, config)

    monkeypatch.setattr(picture, "to_patches", decode)
    yield may_go_on, begun
    may_go_on.set()


def test_a_small_picture_does_not_wait_behind_large_ones(serve, held):
    may_go_on, begun = held
    server = serve(media=MediaConfig(), max_model_len=40_000)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, LARGE))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert begun.acquire(timeout=20)
    assert [ask(server, SMALL).status_code for _ in range(3)] == [200] * 3
    assert answers == []
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 6


def test_a_server_that_stops_does_not_wait_for_pictures_that_nobody_decodes_yet(serve, held):
    may_go_on, begun = held
    server = serve(media=MediaConfig(), max_model_len=40_000)
    decoder = server.app.state.pictures
    waiting = [decoder._large.submit(placed(LARGE).picture.decode) for _ in range(3)]
    assert begun.acquire(timeout=20)
    decoder.close()
    assert [future.cancelled() for future in waiting] == [False, True, True]
    may_go_on.set()
    assert waiting[0].result(20).shape[1:] == (3, 14, 14)


def test_room_is_taken_while_a_picture_is_referred_to():
    decoder = PictureDecoder(10**6)
    entry = placed(SMALL)
    images = asyncio.run(decoder.load([entry, PlacedPicture(7, entry.picture)]))
    assert [image.start for image in images] == [0, 7]
    assert images[0].patches is images[1].patches
    assert decoder.room.num_bytes == 24 * PATCH_BYTES
    del images
    gc.collect()
    assert decoder.room.num_bytes == 0


def test_a_broken_picture_leaves_no_room_taken():
    decoder = PictureDecoder(10**6)
    with pytest.raises(RequestError, match="cannot be decoded"):
        asyncio.run(decoder.load([placed(SMALL), placed(SMALL[:-200])]))
    gc.collect()
    assert decoder.room.num_bytes == 0


def test_pictures_that_one_request_may_not_hold_are_refused_with_the_limit(serve):
    server = serve(media=MediaConfig(), settings=ServerSettings(max_picture_bytes=20_000), max_model_len=4096)
    assert ask(server, SMALL).status_code == 200
    error = ask(server, SMALL, file_of(photo(60, 60))).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_image")
    assert "20000" in error["message"]
    # the engine of the test keeps what it was asked
    server.engine.requests.clear()
    assert ask(server, SMALL).status_code == 200


def test_pictures_for_which_others_leave_no_room_are_to_be_sent_again(serve, held):
    may_go_on, begun = held
    settings = ServerSettings(max_picture_bytes=placed(LARGE).picture.num_patch_bytes + len(LARGE) + 1000)
    server = serve(media=MediaConfig(), settings=settings, max_model_len=40_000)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, LARGE)))
    thread.start()
    assert begun.acquire(timeout=20)
    refused = ask(server, SMALL)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "pictures_full"
    assert server.chat().status_code == 200
    may_go_on.set()
    thread.join()
    server.engine.requests.clear()
    gc.collect()
    assert answers[0].status_code == 200
    server.wait_until(lambda: ask(server, SMALL).status_code == 200)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages[0].content[1].image_url.url"),
        ("/v1/responses", "input[0].content[1].image_url"),
        ("/v1/messages", "messages[0].content[1].source"),
    ],
)
@pytest.mark.parametrize("broken", [b"", b"GIF89a", SMALL[:-200]])
def test_a_broken_picture_is_named_as_the_client_of_each_api_calls_it(serve, path, field, broken):
    server = serve(media=MediaConfig(), max_model_len=4096)
    answer = ask(server, SMALL, broken or b"\x00", path=path)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)
    assert server.engine.requests == []
    assert ask(server, SMALL, path=path).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", [(SMALL, None), (None, SMALL), (SMALL,), (None, SMALL, None)])
def test_a_picture_first_last_or_alone_is_found_where_it_stands_in_every_api(serve, tokenizer, path, order):
    server = serve(media=MediaConfig(), max_model_len=4096)
    assert ask(server, *order, path=path).status_code == 200
    (request,) = server.engine.requests
    pad_id = tokenizer.special_ids["<|media_pad|>"]
    places = [index for index, token_id in enumerate(request.prompt_token_ids) if token_id == pad_id]
    assert places == list(range(request.images[0].start, request.images[0].end))
    text = tokenizer.decode(request.prompt_token_ids)
    message = text[text.index('role="user"') :]
    assert (message.index("hello") < message.index("<|media_pad|>")) if order[0] is None else True
    assert message.count("hello") == order.count(None)


@pytest.mark.parametrize("path", PATHS)
def test_one_to_nine_pictures_are_taken_in_every_api(serve, path):
    server = serve(media=MediaConfig(), max_model_len=4096)
    files = [file_of(photo(28 * (index + 1), 30, seed=index)) for index in range(9)]
    for count in range(1, 10):
        assert ask(server, *files[:count], path=path).status_code == 200
        assert [image.num_tokens for image in server.engine.requests[-1].images] == [2 * n for n in range(1, count + 1)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("side", "num_tokens"), [(448, 256), (512, 361), (504, 324)])
def test_a_picture_is_billed_with_the_tokens_of_the_reference_processor(serve, tokenizer, path, side, num_tokens):
    server = serve(media=MediaConfig(), max_model_len=4096)
    usages = [ask(server, *files, path=path).json()["usage"] for files in ((None,), (None, file_of(photo(side, side))))]
    counts = [usage.get("prompt_tokens", usage.get("input_tokens")) for usage in usages]
    assert counts[1] - counts[0] == num_tokens + 3 + len(tokenizer.encode(f"image {side}x{side}"))


ANIMATION = file_of(photo(9, 9), "GIF", save_all=True, append_images=[photo(9, 9, seed=1)])
BAD = [
    pytest.param(b"\x00", "JPEG, PNG, WEBP, GIF, BMP", id="no picture"),
    pytest.param(b"GIF89a", "GIF", id="header only"),
    pytest.param(SMALL[: len(SMALL) // 2], "cannot be decoded", id="truncated"),
    pytest.param(bytes(reversed(SMALL)), "JPEG, PNG", id="reversed"),
    pytest.param(ANIMATION, "one frame", id="animated"),
    pytest.param(png_header(9000, 9000), "at most 50000000", id="too many pixels"),
    pytest.param(png_header(60000, 60000), "50000000 pixels", id="bomb"),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("data", "says"), BAD)
def test_bad_pictures_say_what_is_allowed_and_leave_a_running_answer_alone(serve, tokenizer, path, data, says):
    spoken = tokenizer.encode_markup("hello world" * 5 + END)
    server = serve(lambda _: spoken, delay_s=0.01, media=MediaConfig(), max_model_len=4096)
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        refused = ask(server, None, data, path=path)
        text = response.read().decode()
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert '"finish_reason":"stop"' in text
    assert len(server.engine.requests) == 1


ODD = [
    pytest.param(file_of(photo(1, 1)), 1, id="1 x 1"),
    pytest.param(file_of(photo(1, 4000)), 143, id="1 x 4000"),
    pytest.param(file_of(photo(60, 40, "CMYK"), "JPEG"), 6, id="CMYK"),
    pytest.param(file_of(Image.fromarray(np.full((40, 60), 40_000, np.uint16))), 6, id="16 bits"),
    pytest.param(file_of(photo(60, 40, "LA")), 6, id="gray and transparent"),
    pytest.param(file_of(photo(60, 40, "P"), "GIF"), 6, id="palette"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("data", "num_tokens"), ODD)
def test_odd_pictures_are_taken_in_every_api(serve, path, data, num_tokens):
    server = serve(media=MediaConfig(), max_model_len=4096)
    assert ask(server, data, path=path).status_code == 200
    assert server.engine.requests[0].images[0].num_tokens == num_tokens
