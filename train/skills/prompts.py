"""Prompts of every skill but pictures for a draft to be trained on: `python -m train.skills.prompts --out FILE`.

Each line is a request that `train/draft.py --prompts` takes, from the trained side.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from perilune.text.tokenizer import Tokenizer
from train.dictionary import DATA_DIR
from train.questions import THINKING_SHARE
from train.skills.supply import SHORT_RECALL, Supply

SHARES: Mapping[str, float] = {
    "dictionary": 0.45,
    "sums": 0.1,
    "talk": 0.05,
    SHORT_RECALL: 0.1,
    "recall": 0.05,
    "tools": 0.15,
    "json": 0.1,
}
RECALL_TOKENS = 256


def prompts(count: int, seed: int, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """`count` requests; equal seeds give equal ones."""
    rng = random.Random(seed)
    supply = Supply(rng, tokenizer, held_out=False)
    for skill in rng.choices(list(SHARES), weights=list(SHARES.values()), k=count):
        dialogue = supply.dialogue(skill, RECALL_TOKENS)
        yield {
            "messages": dialogue.asked,
            "thinking": rng.random() < THINKING_SHARE,
            "tools": dialogue.tools or None,
            "response_format": dialogue.response_format,
        }


def save_prompts(count: int, seed: int, file: Path) -> None:
    """Writes them as JSON lines."""
    lines = [json.dumps(prompt) + "\n" for prompt in prompts(count, seed, Tokenizer.load(DATA_DIR))]
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save_prompts(arguments.count, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
