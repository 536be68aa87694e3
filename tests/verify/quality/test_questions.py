from pathlib import Path

import pytest

from perilune.errors import ConfigError
from perilune.verify.quality.questions import Answer, Call, Question, load_questions, save_questions

FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"type": "object"}}}


def a_question(skill: str = "sums", text: str = "1+1=2", calls: tuple[Call, ...] = (), form: object = None) -> Question:
    return Question(skill, [{"role": "user", "content": "1+1="}], [], form, Answer(text, calls))


def test_questions_come_back_as_they_were_saved(tmp_path: Path):
    questions = [a_question(), a_question("tools", "", (Call("get_time", {"town": "Rome", "n": 1}),))]
    save_questions(questions, tmp_path / "q.gz")
    assert load_questions(file=tmp_path / "q.gz") == {"sums": [questions[0]], "tools": [questions[1]]}


def test_equal_questions_give_equal_bytes(tmp_path: Path):
    for name in ("a", "b"):
        save_questions([a_question()], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_text_counts_to_the_letter_and_json_by_its_value():
    assert a_question().is_answered_by(Answer("1+1=2"))
    assert not a_question().is_answered_by(Answer("1+1=2."))
    form = a_question("json", '{"a":1,"b":2}', form=FORM)
    assert form.is_answered_by(Answer('{"b": 2, "a": 1}'))
    assert not form.is_answered_by(Answer('{"a":1}'))
    assert not form.is_answered_by(Answer("a is 1"))


def test_a_call_counts_by_its_tool_its_arguments_and_their_types():
    wanted = a_question("tools", "", (Call("set_timer", {"minutes": 5}),))
    assert wanted.is_answered_by(Answer("", (Call("set_timer", {"minutes": 5}),)))
    assert not wanted.is_answered_by(Answer("", (Call("set_timer", {"minutes": "5"}),)))
    assert not wanted.is_answered_by(Answer("", (Call("get_time", {"minutes": 5}),)))
    assert not wanted.is_answered_by(Answer(""))
    assert not a_question().is_answered_by(Answer("1+1=2", (Call("set_timer", {"minutes": 5}),)))


def test_the_package_holds_questions_of_every_skill():
    found = load_questions()
    assert list(found) == [
        *["dictionary", "sums", "talk", "short recall", "recall 512", "recall 2k", "recall 8k"],
        *["tools", "json", "pictures"],
    ]
    assert all(len(own) >= 20 for own in found.values())
    assert any(len(question.answer.calls) == 2 for question in found["tools"])
    assert any(question.answer.text for question in found["tools"])


def test_skills_and_numbers_are_chosen_and_an_unknown_skill_is_named():
    assert {skill: len(own) for skill, own in load_questions(["json"], 3).items()} == {"json": 3}
    with pytest.raises(ConfigError, match="--skill is 'maths'; allowed are dictionary, sums"):
        load_questions(["maths"])
