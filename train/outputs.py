"""What a target says: prompts continued by its own engine, to train a draft on."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from perilune.engine.llm import LLM
from perilune.errors import ConfigError
from perilune.sampling.params import SamplingParams
from perilune.text.encoding import encode_chat
from perilune.text.tokenizer import Tokenizer
from train.dictionary import load_dictionary
from train.questions import SKILLS, QuestionSource

OUTPUTS_FILE = "outputs.jsonl"
# Of the demo's prompts: what it is asked mostly, and some texts of which nothing can be foreseen.
DEMO_MIX = {"dictionary": 0.6, "sums": 0.12, "recall": 0.2, "talk": 0.03}
THINKING_SHARE = 0.1
RANDOM_TOKENS = 24
DRAWN_SHARE = 0.2
MAX_TOKENS = 96
CHUNK = 256


@dataclass(frozen=True)
class Output:
    """Prompt and answer as token ids; the first `num_prompt_tokens` are the prompt."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


def demo_prompts(count: int, tokenizer: Tokenizer, vocab_size: int, seed: int) -> Iterator[Sequence[int]]:
    """Token ids of questions like those that the demo was trained on, and of random tokens."""
    source = random.Random(seed)
    questions = QuestionSource(source, load_dictionary(), held_out=False)
    kinds, weights = [*DEMO_MIX, "random"], [*DEMO_MIX.values(), 1 - sum(DEMO_MIX.values())]
    assert set(DEMO_MIX) == set(SKILLS)
    for kind in source.choices(kinds, weights, k=count):
        if kind == "random":
            yield source.choices(range(vocab_size), k=RANDOM_TOKENS)
            continue
        is_thinking = source.random() < THINKING_SHARE
        question = questions.question(kind, thinking=is_thinking)
        yield encode_chat(question.messages, tokenizer, thinking=is_thinking).token_ids


def read_prompts(file: Path, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Token ids of a file's lines, each `{"messages": [...]}` or `{"prompt": "..."}`; ConfigError names a wrong one.

    Beside messages may stand `thinking`, `tools` and `response_format`.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            item = json.loads(line)
            if "messages" in item:
                yield encode_chat(
                    item["messages"],
                    tokenizer,
                    thinking=bool(item.get("thinking", False)),
                    tools=item.get("tools"),
                    response_format=item.get("response_format"),
                ).token_ids
            else:
                yield tokenizer.encode_markup(item["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{file}, line {number}: {error}; give {{"messages": [...]}} or {{"prompt": "..."}} on each line'
            ) from None


def write_outputs(llm: LLM, prompts: Sequence[Sequence[int]], out: Path, seed: int) -> None:
    """Continue the prompts and append each result to `out`; those that are there already are not made again."""
    done = len(read_outputs(out)) if out.exists() else 0
    with out.open("a", encoding="utf-8") as file, tqdm(total=len(prompts), initial=done, unit="answer") as bar:
        for start in range(done, len(prompts), CHUNK):
            chunk = prompts[start : start + CHUNK]
            # a chunk is drawn or greedy as a whole
            is_drawn = random.Random(f"{seed} {start}").random() < DRAWN_SHARE
            params = SamplingParams(temperature=float(is_drawn), max_tokens=MAX_TOKENS, seed=seed + start)
            for prompt, answer in zip(chunk, llm.generate(list(chunk), params), strict=True):
                file.write(json.dumps({"prompt": list(prompt), "answer": list(answer.token_ids)}) + "\n")
            file.flush()
            bar.update(len(chunk))


def read_outputs(file: Path) -> list[Output]:
    """What `write_outputs` wrote; a line that was cut by an interruption is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            item = json.loads(line)
        except ValueError:
            break
        found.append(Output((*item["prompt"], *item["answer"]), len(item["prompt"])))
    return found
