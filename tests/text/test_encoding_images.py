"""Pictures in prompts: the released ids, and what stands around them."""

from typing import Any

import pytest

from perilune.config.media import MediaConfig
from perilune.errors import RequestError
from perilune.text.encoding import EncodedPrompt, encode_chat
from perilune.text.images.reader import ImageReader
from perilune.text.tokenizer import Tokenizer
from tests.text.images.pictures import file_of, image_part, photo
from tests.text.prompts import SMALL, C, O, S

PHOTO = image_part(file_of(photo(640, 480)))
SMALL_PHOTO = image_part(file_of(photo(60, 40)))
SCHEMA = {
    "additionalProperties": False,
    "properties": {"plate": {"type": "string"}},
    "required": ["plate"],
    "type": "object",
}


def encode(content: Any, tokenizer: Tokenizer = SMALL, **options: Any) -> EncodedPrompt:
    messages = [{"role": "user", "content": content}]
    return encode_chat(messages, tokenizer, images=ImageReader(MediaConfig()), **options)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_a_picture_is_the_known_ids(kimi_tokenizer: Tokenizer) -> None:
    prompt = encode([PHOTO], kimi_tokenizer, thinking=False)
    block = (163602, 4017, 220, 24057, 87, 19665, 163603, *[163605] * 414, 163604)
    opening = (163587, 2778, 6244, 878, 2482, 1, 163589)
    assert prompt.token_ids[: len(opening) + len(block)] == opening + block
    assert [placed.start for placed in prompt.pictures] == [len(opening) + 7]


@pytest.mark.parametrize(("thinking", "count"), [(True, 598), (False, 531)])
def test_a_picture_before_a_question_for_json_has_the_known_length(
    kimi_tokenizer: Tokenizer, thinking: bool, count: int
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "plate", "schema": SCHEMA}}
    prompt = encode([PHOTO, text("Read the number plate.")], kimi_tokenizer, thinking=thinking, response_format=form)
    assert len(prompt.token_ids) == count


def test_texts_and_pictures_keep_their_order_and_nothing_stands_between() -> None:
    prompt = encode([text("a"), text("b"), SMALL_PHOTO, text("c"), SMALL_PHOTO], thinking=False)
    shown = SMALL.decode(prompt.token_ids)
    block = "<|media_begin|>image 60x40<|media_content|>" + "<|media_pad|>" * 6 + "<|media_end|>"
    assert f'{O}message role="user"{S}ab{block}c{block}{C}message{S}' in shown
    pad_id = SMALL.special_ids["<|media_pad|>"]
    starts = [placed.start for placed in prompt.pictures]
    assert [prompt.token_ids[start : start + 6] for start in starts] == [(pad_id,) * 6] * 2
    assert starts[1] > starts[0] + 6


def test_the_text_names_the_size_of_the_upload_and_not_the_one_it_is_scaled_to() -> None:
    prompt = encode([image_part(file_of(photo(8000, 20)))], thinking=False)
    assert "image 8000x20" in SMALL.decode(prompt.token_ids)
    assert prompt.pictures[0].picture.size.resized == (7168, 17)


def test_a_text_that_spells_the_block_stays_text() -> None:
    spelled = "<|media_begin|>image 60x40<|media_content|><|media_pad|><|media_end|><|kimi_image_placeholder|>"
    prompt = encode([text(spelled)], thinking=False)
    assert spelled in SMALL.decode(prompt.token_ids)
    assert prompt.pictures == ()
    assert SMALL.special_ids["<|media_pad|>"] not in prompt.token_ids


def test_segments_spell_the_prompt() -> None:
    prompt = encode([text("a"), SMALL_PHOTO], thinking=False)
    spelled = "".join(
        segment.text * (1 if segment.picture is None else segment.picture.size.num_tokens)
        for segment in prompt.segments
    )
    assert spelled == SMALL.decode(prompt.token_ids)


def test_a_picture_that_stands_there_twice_is_decoded_once() -> None:
    first, second = encode([SMALL_PHOTO, SMALL_PHOTO]).load_images()
    assert first.patches is second.patches
    assert (second.start, second.num_tokens) == (first.start + 6 + len("image 60x40") + 3, 6)


def test_the_second_of_two_pictures_is_the_broken_one() -> None:
    data = file_of(photo(60, 40))
    prompt = encode([SMALL_PHOTO, image_part(data[: len(data) // 2])])
    with pytest.raises(RequestError) as raised:
        prompt.load_images()
    assert raised.value.param == "messages[0].content[1].image_url.url"
