"""Draws the held-out questions that `perilune verify quality` asks: `python -m train.skills.held_out`."""

import json
from collections.abc import Iterator

from perilune.text.tokenizer import Tokenizer
from perilune.verify.quality.questions import HELD_OUT_FILE, Answer, Call, Question, save_questions
from train.dictionary import DATA_DIR
from train.skills.dialogue import Dialogue, expected_calls
from train.skills.supply import SHORT_RECALL, held_out_dialogues
from train.split import FIRST_EVALUATION_SEED

NUM_QUESTIONS = 100
# Long texts: how many tokens, and how many questions.
RECALL = {"recall 512": (500, 60), "recall 2k": (2000, 40), "recall 8k": (7900, 20)}
SKILLS = ("dictionary", "sums", "talk", SHORT_RECALL, *RECALL, "tools", "json", "pictures")


def as_question(dialogue: Dialogue, skill: str) -> Question:
    """A dialogue as what is sent and what is right."""
    calls = tuple(Call(name, json.loads(str(arguments))) for name, arguments in expected_calls(dialogue.answer))
    answer = Answer(str(dialogue.answer["content"]).strip(), calls)
    return Question(skill, dialogue.asked, dialogue.tools, dialogue.response_format, answer)


def questions(tokenizer: Tokenizer) -> Iterator[Question]:
    """All of them, skill by skill, no request twice."""
    for skill in SKILLS:
        num_tokens, count = RECALL.get(skill, (0, NUM_QUESTIONS))
        name = "recall" if skill in RECALL else skill
        seen: set[str] = set()
        for dialogue in held_out_dialogues(name, 3 * count, FIRST_EVALUATION_SEED, tokenizer, num_tokens=num_tokens):
            request = json.dumps(dialogue.asked)
            if len(seen) < count and request not in seen:
                seen.add(request)
                yield as_question(dialogue, skill)


def main() -> None:
    drawn = list(questions(Tokenizer.load(DATA_DIR)))
    save_questions(drawn, HELD_OUT_FILE)
    print(f"{len(drawn)} questions -> {HELD_OUT_FILE}")


if __name__ == "__main__":
    main()
