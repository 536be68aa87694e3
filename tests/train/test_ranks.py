import random
from pathlib import Path

import pytest

from perilune.text.encoding import encode_chat
from perilune.text.rank_file import read_rank_file
from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.questions import SKILLS, QuestionSource
from train.ranks import NUM_RANKS, count_pieces, save_ranks, train_ranks


def test_the_demo_vocabulary_has_2048_ids_and_no_longer_token_holds_a_digit(ranks: dict[bytes, int]):
    assert len(ranks) == NUM_RANKS == 2048 - 256
    assert [token for token in ranks if len(token) > 1 and any(chr(byte).isdigit() for byte in token)] == []


def test_a_number_is_one_token_a_digit(tokenizer: Tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10
    assert len(tokenizer.encode("47+38=85")) == 8


@pytest.mark.parametrize("text", ["", "\x00\x7f", "Ünï 你好 🙂\r\n\t", "<|open|> 12345 don't", "a" * 2000])
def test_any_text_comes_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_kind_of_question_comes_back(tokenizer: Tokenizer):
    source = QuestionSource(random.Random(0), load_dictionary(), held_out=True)
    for skill in SKILLS:
        for _ in range(50):
            question = source.question(skill, thinking=True)
            for text in (question.messages[-1]["content"], question.reasoning or "", question.answer):
                assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "word", ["message", "response", "think", "user", "assistant", "system", " role", '="', " type"]
)
def test_the_words_of_the_chat_format_are_single_tokens(tokenizer: Tokenizer, word: str):
    assert len(tokenizer.encode(word)) == 1


def test_thinking_costs_few_tokens_of_the_prompt(tokenizer: Tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    with_thinking = encode_chat(messages, tokenizer, thinking=True, effort="low")
    without = encode_chat(messages, tokenizer, thinking=False)
    assert len(with_thinking.token_ids) - len(without.token_ids) < 70


def test_merges_are_the_most_frequent_pairs_and_leave_digits_alone():
    ranks = train_ranks({"aab": 5, "ab": 4, "cc": 3, "11": 1000, "a1": 900}, 256 + 3)
    assert list(ranks)[256:] == [b"ab", b"aab", b"cc"]
    assert [ranks[token] for token in (b"ab", b"aab", b"cc")] == [256, 257, 258]


def test_too_small_a_corpus_is_an_error():
    with pytest.raises(ValueError, match="corpus is too small"):
        train_ranks({"ab": 1}, 256 + 2)


def test_pieces_are_counted_as_the_tokenizer_splits_them():
    assert count_pieces(["Add 47 and 38.", "Add"]) == {"Add": 2, " ": 2, "47": 1, " and": 1, "38": 1, ".": 1}


def test_a_saved_rank_file_reads_back(tmp_path: Path):
    ranks = train_ranks({"hello": 3, "help": 2}, 260)
    save_ranks(ranks, tmp_path / "new" / "tiktoken.model")
    assert read_rank_file(tmp_path / "new" / "tiktoken.model") == ranks
