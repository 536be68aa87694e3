from pathlib import Path

from perilune.text.tokenizer import Tokenizer
from perilune.verify.quality.questions import load_questions, save_questions
from train.skills.held_out import questions
from train.skills.pictures import FONT_DIR


def test_the_committed_questions_are_what_the_generators_give(grown: Tokenizer, tmp_path: Path):
    save_questions(list(questions(grown)), tmp_path / "drawn.gz")
    drawn = load_questions(file=tmp_path / "drawn.gz")
    for skill, own in load_questions().items():
        if skill != "pictures" or FONT_DIR.exists():
            assert drawn[skill] == own, skill
