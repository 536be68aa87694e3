import json
import random

from train.skills.forms import FormSource


def dialogues(*, held_out: bool):
    source = FormSource(random.Random(5), held_out=held_out)
    return [source.dialogue() for _ in range(300)]


def test_the_answer_fits_the_schema_and_every_value_stands_in_the_text():
    kinds = {"string": str, "integer": int}
    for dialogue in dialogues(held_out=False):
        schema = dialogue.response_format["json_schema"]["schema"]
        values = json.loads(dialogue.answer["content"])
        assert list(values) == schema["required"] == list(schema["properties"])
        assert all(type(value) is kinds[schema["properties"][key]["type"]] for key, value in values.items())
        assert all(str(value) in dialogue.messages[0]["content"] for value in values.values())


def test_some_of_what_is_told_is_not_asked_for():
    told = [len(dialogue.messages[0]["content"].split(". ")) for dialogue in dialogues(held_out=True)]
    asked = [len(json.loads(dialogue.answer["content"])) - 1 for dialogue in dialogues(held_out=True)]
    assert any(more > fewer for more, fewer in zip(told, asked, strict=True))


def test_no_text_is_on_both_sides():
    sides = [{dialogue.messages[0]["content"] for dialogue in dialogues(held_out=side)} for side in (False, True)]
    assert not sides[0] & sides[1]
