"""Held-out questions with their right answers, as they lie in the package: `held_out.jsonl.gz`.

They are drawn by `python -m train.skills.held_out`; training never sees them.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError

HELD_OUT_FILE = Path(__file__).parent / "held_out.jsonl.gz"


@dataclass(frozen=True)
class Call:
    """A tool and the values of its arguments."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Answer:
    """What a model says: text, calls or both; `text` has no blanks at its ends."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Question:
    """A chat request of the OpenAI API without settings, and the answer that is right."""

    skill: str
    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]]
    response_format: Mapping[str, object] | None
    answer: Answer

    def is_answered_by(self, answer: Answer) -> bool:
        """Whether an answer is right: the text to the letter, calls in their order, JSON by its value."""
        if answer.calls != self.answer.calls:
            return False
        if self.response_format is None:
            return answer.text == self.answer.text
        try:
            return bool(json.loads(answer.text) == json.loads(self.answer.text))
        except ValueError:
            return False


def load_questions(
    skills: Sequence[str] = (), most: int | None = None, file: Path = HELD_OUT_FILE
) -> dict[str, list[Question]]:
    """The questions by skill, of these skills only if any are named, at most so many of each; ConfigError else."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        questions = [_question(json.loads(line)) for line in lines]
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.skill, []).append(question)
    if unknown := [skill for skill in skills if skill not in found]:
        raise ConfigError(f"--skill is {unknown[0]!r}; allowed are {', '.join(found)}")
    return {skill: own[:most] for skill, own in found.items() if not skills or skill in skills}


def save_questions(questions: Sequence[Question], file: Path) -> None:
    """Write them so that equal questions give equal bytes."""
    lines = [json.dumps(_values(question), ensure_ascii=False) + "\n" for question in questions]
    file.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def _question(values: Mapping[str, object]) -> Question:
    calls = tuple(Call(name, arguments) for name, arguments in values["calls"])  # type: ignore[attr-defined]
    return Question(
        skill=values["skill"],  # type: ignore[arg-type]
        messages=values["messages"],  # type: ignore[arg-type]
        tools=values["tools"],  # type: ignore[arg-type]
        response_format=values["response_format"],  # type: ignore[arg-type]
        answer=Answer(values["text"], calls),  # type: ignore[arg-type]
    )


def _values(question: Question) -> dict[str, object]:
    return {
        "skill": question.skill,
        "messages": question.messages,
        "tools": question.tools,
        "response_format": question.response_format,
        "text": question.answer.text,
        "calls": [[call.name, call.arguments] for call in question.answer.calls],
    }
