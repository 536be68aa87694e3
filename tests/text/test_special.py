import base64
import json
from pathlib import Path
from typing import Any

import pytest

from perilune.errors import ConfigError
from perilune.text.tokenizer import Tokenizer

from .conftest import small_ranks

NUM_RANKS = len(small_ranks())


def checkpoint(tmp_path: Path, config: Any = None, names: Any = None) -> Path:
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in small_ranks().items())
    (tmp_path / "tiktoken.model").write_text(text)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    if names is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return tmp_path


def test_special_ids_follow_the_ranks_of_any_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.num_ranks == NUM_RANKS
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert tokenizer.special_ids["[BOS]"] == NUM_RANKS
    assert tokenizer.special_ids["<|media_pad|>"] == NUM_RANKS + 163605 - 163584
    assert tokenizer.special_name(NUM_RANKS + 8) == f"<|reserved_token_{NUM_RANKS + 8}|>"
    assert tokenizer.special_name(NUM_RANKS - 1) is None
    assert tokenizer.special_name(NUM_RANKS + 256) is None
    assert len(tokenizer.special_ids) == 256


def test_the_end_of_a_message_is_the_first_stop_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (NUM_RANKS + 2, NUM_RANKS + 1, NUM_RANKS + 9)


def test_released_ids(kimi_tokenizer: Tokenizer) -> None:
    assert kimi_tokenizer.vocab_size == 163840
    assert kimi_tokenizer.eos_token_ids == (163586, 163585, 163593)
    ids = kimi_tokenizer.special_ids
    assert (ids["[BOS]"], ids["<|open|>"], ids["<|close|>"], ids["<|sep|>"]) == (163584, 163587, 163588, 163589)
    assert (ids["<|start_header_id|>"], ids["<|end_header_id|>"]) == (163590, 163591)
    assert (ids["<|media_begin|>"], ids["<|media_content|>"], ids["<|media_end|>"]) == (163602, 163603, 163604)
    assert (ids["<|media_pad|>"], ids["[UNK]"], ids["[PAD]"]) == (163605, 163838, 163839)
    assert ids["<|reserved_token_163594|>"] == 163594


def test_names_in_the_checkpoint_override(tmp_path: Path) -> None:
    names = {"added_tokens_decoder": {str(NUM_RANKS + 8): {"content": "<|extra|>", "special": True}}}
    tokenizer = Tokenizer.load(checkpoint(tmp_path, names=names))
    assert tokenizer.special_ids["<|extra|>"] == NUM_RANKS + 8
    assert tokenizer.encode_markup("<|extra|>") == [NUM_RANKS + 8]


@pytest.mark.parametrize(
    ("token_id", "entry", "message"),
    [
        (NUM_RANKS - 1, {"content": "<|x|>"}, f"has id {NUM_RANKS - 1}; special ids go from {NUM_RANKS} to"),
        (NUM_RANKS + 256, {"content": "<|x|>"}, f"special ids go from {NUM_RANKS} to {NUM_RANKS + 255}"),
        (NUM_RANKS + 8, {"content": "<|open|>"}, f"'<|open|>' belongs to both id {NUM_RANKS + 3} and id"),
        (NUM_RANKS + 2, {"content": "<|im_end|>"}, f"'<|end_of_msg|>' (id {NUM_RANKS + 2} is called '<|im_end|>')"),
        (NUM_RANKS + 8, {"name": "<|x|>"}, 'expected "<id>": {"content": "<name>"}'),
        ("x", {"content": "<|x|>"}, "added_tokens_decoder['x']"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, token_id: object, entry: object, message: str) -> None:
    directory = checkpoint(tmp_path, names={"added_tokens_decoder": {str(token_id): entry}})
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(directory)
    assert str(directory / "tokenizer_config.json") in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("place", ["", "text_config"])
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("bos_token_id", "[BOS]"),
        ("eos_token_id", "<|end_of_msg|>"),
        ("pad_token_id", "[PAD]"),
        ("media_placeholder_token_id", "<|media_pad|>"),
    ],
)
def test_ids_of_the_config_must_agree(tmp_path: Path, tokenizer: Tokenizer, place: str, key: str, name: str) -> None:
    def config(token_id: int) -> dict[str, Any]:
        return {place: {key: token_id}} if place else {key: token_id}

    right = tokenizer.special_ids[name]
    Tokenizer.load(checkpoint(tmp_path, config=config(right)))
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(checkpoint(tmp_path, config=config(right + 1)))
    assert f"{key} is {right + 1} but the tokenizer's {name} has id {right}" in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_the_embedding_may_be_larger_than_the_vocabulary_but_not_smaller(tmp_path: Path) -> None:
    Tokenizer.load(checkpoint(tmp_path, config={"text_config": {"vocab_size": NUM_RANKS + 256 + 64}}))
    with pytest.raises(ConfigError, match=f"vocab_size is {NUM_RANKS + 255} but the tokenizer has {NUM_RANKS + 256}"):
        Tokenizer.load(checkpoint(tmp_path, config={"text_config": {"vocab_size": NUM_RANKS + 255}}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\x80", "[" * 100_000])
def test_broken_json_names_its_file(tmp_path: Path, name: str, content: str) -> None:
    directory = checkpoint(tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(directory)
