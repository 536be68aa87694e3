from pathlib import Path

import pytest

from train.dictionary import (
    DATA_DIR,
    LICENSE_FILE,
    MAX_DEFINITION_CHARS,
    NUM_WORDS,
    build,
    load_dictionary,
    shorten,
)


def test_the_dictionary_has_2000_different_words_with_short_ascii_definitions():
    entries = load_dictionary()
    assert len(entries) == NUM_WORDS == 2000
    assert len({entry.word for entry in entries}) == NUM_WORDS
    for entry in entries:
        assert entry.word.isascii()
        assert entry.word.islower()
        assert entry.pos in ("noun", "verb", "adj", "adv")
        assert entry.definition == entry.definition.strip()
        assert 0 < len(entry.definition) <= MAX_DEFINITION_CHARS
        assert not set(entry.definition) & set('";()\t')


def test_the_licence_of_wordnet_lies_beside_the_data():
    assert LICENSE_FILE.parent == DATA_DIR
    text = LICENSE_FILE.read_text(encoding="utf-8")
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in text
    assert "Permission to use, copy, modify and distribute this software and" in text


@pytest.mark.parametrize(
    ("gloss", "definition"),
    [
        ('a human being; "there was too much for one person to do"', "a human being"),
        ("(of an idea) new ; (informal) odd", "new"),
        ("walk (slowly), and stop", "walk, and stop"),
        ('so named "by many"', "so named"),
    ],
)
def test_a_gloss_is_cut_to_its_first_statement(gloss: str, definition: str):
    assert shorten(gloss) == definition


def write_wordnet(directory: Path) -> None:
    nouns = {"cat": "an animal; it purrs", "slur": "offensive name for a group", "long": "x" * 80}
    data, index = "", "  1 header line\n"
    for word, gloss in nouns.items():
        index += f"{word} n 1 1 @ 1 1 {len(data):08d}  \n"
        data += f"{len(data):08d} 05 n 01 {word} 0 000 | {gloss}  \n"
    verbs = "00000000 29 v 01 cat 0 000 | to vomit  \n"
    (directory / "index.noun").write_text(index)
    (directory / "data.noun").write_text(data)
    (directory / "index.verb").write_text("cat v 1 0 1 1 00000000  \n")
    (directory / "data.verb").write_text(verbs)
    for pos in ("adj", "adv"):
        (directory / f"index.{pos}").write_text("")
        (directory / f"data.{pos}").write_text("")
    counts = "cat%1:05:00:: 1 9\ncat%2:29:00:: 1 2\nslur%1:05:00:: 1 8\nlong%1:05:00:: 1 7\nelse%4:02:00:: 1 6\n"
    (directory / "cntlist.rev").write_text(counts + "two_words%1:05:00:: 1 99\n")


def test_each_word_is_taken_once_with_its_commonest_part_of_speech_and_insults_are_left_out(tmp_path: Path):
    write_wordnet(tmp_path)
    entries = build(tmp_path, num_words=10, max_chars=60)
    assert [(entry.word, entry.pos, entry.definition) for entry in entries] == [("cat", "noun", "an animal")]
