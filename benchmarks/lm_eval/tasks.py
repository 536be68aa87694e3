"""A small task for lm-eval: questions that the demo model was not trained on, asked in three ways."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from train.dictionary import load_dictionary
from train.evaluate import held_out_questions
from train.split import FIRST_EVALUATION_SEED

SKILLS = ("dictionary", "sums")
NUM_CHOICES = 4

# the prompt that /v1/chat/completions would write, thinking off; /v1/completions reads names of control tokens as such
_RAW = (
    '<|open|>message role="user"<|sep|>{{question}}<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
)
_HEAD = """task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: '{text}'
"""
_GENERATED = """output_type: generate_until
doc_to_target: '{{answer}}'
generation_kwargs:
  until: ['<|close|>']
  max_gen_toks: 128
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
_CHOSEN = """output_type: multiple_choice
doc_to_choice: '{{choices}}'
doc_to_target: gold
target_delimiter: ''
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
# name: (what stands in the prompt, what is done with it, the file of questions)
TASKS = {
    "perilune_chat": ("{{question}}", _GENERATED, "questions.jsonl"),
    "perilune_completion": (_RAW, _GENERATED, "questions.jsonl"),
    "perilune_choice": (_RAW, _CHOSEN, "choices.jsonl"),
}


def write_tasks(directory: Path, count: int) -> None:
    """Write the questions, `count` of each skill, and what lm-eval is to do with them."""
    directory.mkdir(parents=True, exist_ok=True)
    asked = [q for skill in SKILLS for q in held_out_questions(skill, count, FIRST_EVALUATION_SEED, thinking=False)]
    questions = [{"question": q.messages[-1]["content"], "answer": q.answer} for q in asked if len(q.messages) == 1]
    _write_lines(directory / "questions.jsonl", questions)
    definitions = [entry.definition for entry in load_dictionary()]
    chosen = questions[:count]
    rng = random.Random(FIRST_EVALUATION_SEED)
    _write_lines(directory / "choices.jsonl", [_with_choices(question, definitions, rng) for question in chosen])
    for task, (text, rest, data) in TASKS.items():
        head = _HEAD.format(task=task, data=directory.resolve() / data, text=text)
        (directory / f"{task}.yaml").write_text(head + rest)


def _with_choices(question: dict[str, str], definitions: Sequence[str], rng: random.Random) -> dict[str, object]:
    """A question of the dictionary with the definitions of other words beside its own."""
    others = rng.sample([text for text in definitions if text != question["answer"]], NUM_CHOICES - 1)
    choices = rng.sample([question["answer"], *others], NUM_CHOICES)
    return {**question, "choices": choices, "gold": choices.index(question["answer"])}


def _write_lines(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
