"""Measures the share of exact answers per skill in every setting, each on a server of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from perilune.verify.quality.asking import RefusedError, ask_all
from perilune.verify.quality.questions import Question
from perilune.verify.quality.settings import Setting

# Starts a server with these arguments and yields its address.
Serve = Callable[[Sequence[str]], AbstractContextManager[str]]
# More is lost than the rounding of a setting may cost, and more than one question may tip.
MAX_LOST_POINTS, MAX_LOST_QUESTIONS = 1.0, 1


@dataclass(frozen=True)
class Score:
    """Exact answers of one skill; `refusal` says why the model cannot be asked at all, and then both counts are 0."""

    asked: int
    exact: int
    refusal: str | None = None

    @property
    def percent(self) -> float:
        return 100.0 * self.exact / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Result:
    """Scores of one setting by skill."""

    setting: Setting
    scores: Mapping[str, Score]


def measure(
    checkpoint: Sequence[str],
    questions: Mapping[str, Sequence[Question]],
    settings: Sequence[Setting],
    serve: Serve,
    answered: Callable[[int], None],
) -> Iterator[Result]:
    """One result after the other; `answered` hears of every few answers how many there were."""
    for setting in settings:
        with serve([*checkpoint, *setting.arguments]) as url:
            scores = {}
            for skill, own in questions.items():
                if setting.is_asked_twice:
                    for _ in ask_all(url, own, setting):
                        pass
                scores[skill] = _score(url, own, setting, answered)
        yield Result(setting, scores)


def _score(url: str, questions: Sequence[Question], setting: Setting, answered: Callable[[int], None]) -> Score:
    exact, refusal = 0, None
    for question, answer in zip(questions, ask_all(url, questions, setting), strict=True):
        answered(1)
        if isinstance(answer, RefusedError):
            refusal = str(answer)
        else:
            exact += question.is_answered_by(answer)
    return Score(0, 0, refusal) if refusal is not None else Score(len(questions), exact)


def losses(results: Sequence[Result]) -> list[str]:
    """Where a setting costs more against the first one than it may; thinking is another task, and is not compared."""
    base = results[0]
    found = []
    for result in results[1:]:
        if result.setting.effort != base.setting.effort:
            continue
        for skill, score in result.scores.items():
            lost = base.scores[skill].exact - score.exact
            points = base.scores[skill].percent - score.percent
            if lost > MAX_LOST_QUESTIONS and points > MAX_LOST_POINTS:
                found.append(f"{result.setting.name}: {skill} loses {points:.1f} points ({lost} of {score.asked})")
    return found
