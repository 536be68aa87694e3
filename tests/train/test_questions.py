import random
import re

import pytest

from train.dictionary import load_dictionary
from train.questions import (
    CLOSINGS,
    DEFAULT_MIX,
    DEFINE_PHRASES,
    MAX_FACTS,
    OPENINGS,
    SKILLS,
    SUM_PHRASES,
    QuestionSource,
    is_held_out_phrase,
    is_held_out_sum,
    sum_reasoning,
)


def source(seed: int, *, held_out: bool = False) -> QuestionSource:
    return QuestionSource(random.Random(seed), load_dictionary(), held_out=held_out)


@pytest.mark.parametrize("held_out", [False, True])
def test_equal_seeds_give_equal_questions_and_others_do_not(held_out: bool):
    def draw(seed: int) -> list[object]:
        drawn = source(seed, held_out=held_out)
        return [drawn.question(skill, thinking=True) for skill in SKILLS for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_the_mix_covers_every_skill():
    assert set(DEFAULT_MIX) == set(SKILLS)
    assert sum(DEFAULT_MIX.values()) == pytest.approx(1.0)


def pairs_of(text: str) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in re.findall(r"(\d+)\+(\d+)=\d+", text)}


def test_no_held_out_sum_is_trained_in_either_order():
    training, evaluation = source(0), source(1, held_out=True)
    trained = {pair for _ in range(6000) for pair in pairs_of(training.sums().answer)}
    held_out = {pair for _ in range(600) for pair in pairs_of(evaluation.sums().answer)}
    assert len(trained) > 4000
    assert len(held_out) > 200
    assert not trained & held_out
    assert not {(b, a) for a, b in trained} & held_out
    assert all(10 <= a <= 99 and 10 <= b <= 99 for a, b in held_out)


def test_about_one_sum_in_twenty_is_held_out():
    share = sum(is_held_out_sum(a, b) for a in range(10, 100) for b in range(10, 100)) / 8100
    assert 0.03 < share < 0.07


@pytest.mark.parametrize("phrases", [DEFINE_PHRASES, SUM_PHRASES])
def test_held_out_phrasings_are_never_trained_although_all_their_parts_are(phrases: tuple[str, ...]):
    trained, held_out = source(0), source(1, held_out=True)
    seen = {trained.phrase(phrases) for _ in range(20_000)}
    new = {held_out.phrase(phrases) for _ in range(2_000)}
    assert not seen & new
    assert len(new) > 20
    for part in (*OPENINGS, *CLOSINGS, *phrases):
        assert any(part in text for text in seen)
        assert any(part in text for text in new)


def test_a_question_without_opening_or_closing_is_always_trained():
    for phrase in DEFINE_PHRASES:
        assert not is_held_out_phrase("", "", phrase)
        assert not is_held_out_phrase(OPENINGS[0], "", phrase)
        assert not is_held_out_phrase("", CLOSINGS[0], phrase)


def test_a_pass_over_the_dictionary_asks_for_every_word_once_and_answers_verbatim():
    entries = load_dictionary()
    drawn = source(3)
    answers = [drawn.dictionary().answer for _ in entries]
    assert sorted(answers) == sorted(entry.definition for entry in entries)


@pytest.mark.parametrize(
    ("a", "b", "reasoning"),
    [
        (47, 38, "7+8=15, carry 1. 4+3+1=8."),
        (21, 34, "1+4=5. 2+3=5."),
        (97, 88, "7+8=15, carry 1. 9+8+1=18."),
        (3, 9, "3+9=12."),
        (8, 95, "8+5=13, carry 1. 0+9+1=10."),
    ],
)
def test_the_reasoning_of_a_sum_goes_digit_by_digit(a: int, b: int, reasoning: str):
    assert sum_reasoning(a, b) == reasoning


def test_every_sum_is_right():
    drawn = source(4)
    for _ in range(500):
        for line in drawn.sums().answer.split("\n"):
            left, _, right = line.partition("=")
            a, _, b = left.partition("+")
            assert int(a) + int(b) == int(right)


@pytest.mark.parametrize(("level", "most"), [(0.0, 2), (0.5, 5), (1.0, MAX_FACTS)])
def test_the_level_sets_how_many_facts_there_are(level: float, most: int):
    drawn = source(6)
    counts = {len(drawn.context(level).facts) for _ in range(300)}
    assert counts == set(range(1, most + 1))


@pytest.mark.parametrize("held_out", [False, True])
def test_the_answer_to_a_recall_question_stands_in_the_prompt(held_out: bool):
    drawn = source(7, held_out=held_out)
    for _ in range(300):
        question = drawn.question("recall", thinking=False)
        prompt = "\n".join(message["content"] for message in question.messages)
        assert question.reasoning is None
        for line in question.answer.split("\n"):
            assert line in prompt


def test_an_unknown_skill_is_refused_by_name():
    with pytest.raises(ValueError, match=r"skill 'poetry' .* allowed: dictionary, sums, talk"):
        source(0).exchange("poetry")
