import random

import pytest

from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.skills.dialogue import DialogueWriter
from train.skills.memory import MemorySource


def source(tokenizer: Tokenizer, *, held_out: bool, seed: int = 4) -> MemorySource:
    return MemorySource(
        random.Random(seed), load_dictionary(), lambda text: len(tokenizer.encode(text)), held_out=held_out
    )


@pytest.mark.parametrize("num_tokens", [200, 2000])
def test_a_text_is_about_as_long_as_was_asked(grown: Tokenizer, num_tokens: int):
    dialogue = source(grown, held_out=True).dialogue(num_tokens)
    row = DialogueWriter(grown).row(dialogue, None)
    assert 0.8 * num_tokens < len(row.token_ids) < 1.15 * num_tokens + 60


def test_every_answer_stands_in_the_text(grown: Tokenizer):
    for _ in range(20):
        dialogue = source(grown, held_out=False).dialogue(300, num_questions=3)
        text = dialogue.messages[0]["content"]
        answers = [message["content"] for message in dialogue.messages[1::2]]
        assert len(answers) == 3
        assert all(text.count(answer) == 1 for answer in answers)


def test_no_fact_is_on_both_sides(grown: Tokenizer):
    sides = []
    for held_out in (False, True):
        drawn = source(grown, held_out=held_out)
        sides.append({drawn.dialogue(60).answer["content"] for _ in range(300)})
    assert not sides[0] & sides[1]
