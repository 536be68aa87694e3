"""Measures exact answers on held-out questions, through a running server or through any generating function.

    python -m train.evaluate --url http://127.0.0.1:8000 --questions 200 --seed 1000000

Seeds below 1,000,000 belong to training. Questions use phrase combinations, sums and facts that training never shows;
the dictionary's words are the known ones.
"""

import argparse
import http.client
import json
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from train.dictionary import load_dictionary
from train.questions import Question, QuestionSource
from train.split import FIRST_EVALUATION_SEED

EVALUATED_SKILLS = ("dictionary", "sums", "recall")
CONCURRENCY = 8
MAX_TOKENS = 256
TIMEOUT_S = 300.0

Messages = Sequence[Mapping[str, str]]
# Conversations in, the content of one answer for each out, in the same order.
Generate = Callable[[Sequence[Messages]], Iterator[str] | Sequence[str]]


@dataclass(frozen=True)
class Miss:
    """A question that was not answered exactly."""

    prompt: str
    expected: str
    answer: str


@dataclass(frozen=True)
class SkillScore:
    """Exact answers of one skill."""

    skill: str
    asked: int
    exact: int
    misses: tuple[Miss, ...]

    @property
    def rate(self) -> float:
        return self.exact / self.asked


def held_out_questions(skill: str, count: int, seed: int, *, thinking: bool) -> list[Question]:
    """`count` different held-out questions; ValueError for a training seed or when there are not that many."""
    if seed < FIRST_EVALUATION_SEED:
        raise ValueError(f"seed {seed} belongs to training; evaluation seeds start at {FIRST_EVALUATION_SEED}")
    source = QuestionSource(random.Random(f"{skill}-{seed}"), load_dictionary(), held_out=True)
    questions: dict[str, Question] = {}
    for _ in range(10 * count):
        if len(questions) == count:
            return list(questions.values())
        question = source.question(skill, thinking=thinking)
        questions.setdefault(_identity(question), question)
    raise ValueError(f"{skill} has only about {len(questions)} held-out questions, {count} were asked for")


def _identity(question: Question) -> str:
    # The same sum in other words would measure nothing new.
    return question.answer if question.skill == "sums" else json.dumps(question.messages)


def evaluate(
    generate: Generate, *, seed: int, count: int, skills: Sequence[str] = EVALUATED_SKILLS, thinking: bool = False
) -> list[SkillScore]:
    """Ask `count` held-out questions of each skill and compare the answers exactly (blanks at the ends aside)."""
    scores = []
    for skill in skills:
        questions = held_out_questions(skill, count, seed, thinking=thinking)
        answers = list(generate([question.messages for question in questions]))
        misses = tuple(
            Miss(question.messages[-1]["content"], question.answer, answer)
            for question, answer in zip(questions, answers, strict=True)
            if answer.strip() != question.answer
        )
        scores.append(SkillScore(skill, count, count - len(misses), misses))
    return scores


def request_json(url: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
    """GET, or POST of `body`; ConnectionError naming the address when the server is away or refuses."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            reply: dict[str, object] = json.loads(response.read())
            return reply
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{url}: status {error.code}: {error.read().decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"{url}: {error}") from error


class ServerGenerator:
    """Answers through /v1/chat/completions at temperature 0, several requests at a time."""

    def __init__(self, url: str, *, thinking: bool) -> None:
        self._url = url.rstrip("/")
        self._effort = "low" if thinking else "none"
        models = request_json(f"{self._url}/v1/models")["data"]
        assert isinstance(models, list)
        self.model: str = models[0]["id"]

    def __call__(self, conversations: Sequence[Messages]) -> Iterator[str]:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            yield from tqdm(pool.map(self._answer, conversations), total=len(conversations), leave=False)

    def _answer(self, messages: Messages) -> str:
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "reasoning_effort": self._effort,
        }
        reply = request_json(f"{self._url}/v1/chat/completions", body)
        choices = reply["choices"]
        assert isinstance(choices, list)
        return choices[0]["message"]["content"] or ""


def table(scores: Sequence[SkillScore]) -> str:
    """Scores as aligned text."""
    lines = [f"{'skill':<12} {'asked':>6} {'exact':>6} {'rate':>8}"]
    lines += [f"{s.skill:<12} {s.asked:>6} {s.exact:>6} {s.rate:>8.1%}" for s in scores]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--questions", type=int, default=200, help="per skill")
    parser.add_argument("--seed", type=int, default=FIRST_EVALUATION_SEED)
    parser.add_argument("--skills", default=",".join(EVALUATED_SKILLS), help="comma-separated")
    parser.add_argument("--thinking", choices=("off", "on"), default="off")
    parser.add_argument("--json", type=Path, help="store figures and misses here")
    args = parser.parse_args(arguments)
    args.skills = args.skills.split(",")
    if unknown := set(args.skills) - set(EVALUATED_SKILLS):
        parser.error(f"--skills: unknown {', '.join(sorted(unknown))}; allowed: {', '.join(EVALUATED_SKILLS)}")
    if args.seed < FIRST_EVALUATION_SEED:
        parser.error(f"--seed {args.seed} belongs to training; use at least {FIRST_EVALUATION_SEED}")
    if args.questions < 1:
        parser.error(f"--questions {args.questions}: ask at least one")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    is_thinking = args.thinking == "on"
    try:
        generate = ServerGenerator(args.url, thinking=is_thinking)
        scores = evaluate(generate, seed=args.seed, count=args.questions, skills=args.skills, thinking=is_thinking)
    except (ConnectionError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{generate.model}, seed {args.seed}, thinking {args.thinking}, temperature 0")
    print(table(scores))
    if args.json:
        report = {
            "model": generate.model,
            "seed": args.seed,
            "thinking": args.thinking,
            "scores": [{**asdict(score), "rate": score.rate} for score in scores],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
