"""Small talk that says what the model is: the lines of `train/questions.py` between openings and closings.

Held out: the combinations of opening, line and closing that `is_held_out_phrase` keeps.
"""

from train.questions import TALK, QuestionSource
from train.skills.dialogue import Dialogue, says, user

# Lines that are openings or closings themselves stand alone in training.
ASKING = tuple((lines, answer) for lines, answer in TALK if lines[0].endswith("?"))


def talk_dialogue(source: QuestionSource) -> Dialogue:
    """One line of small talk from the source's side of the split."""
    lines, answer = source.rng.choice(ASKING if source.held_out else TALK)
    is_greeting = (lines, answer) not in ASKING
    line = source.rng.choice(lines) if is_greeting else source.phrase(lines)
    return Dialogue("talk", (user(line), says(answer, "Small talk.")))
