"""Grows a trained model's vocabulary: further merges behind the known ranks, and rows for them.

    python -m train.skills.growth

writes `train/data/tiktoken.model`: the demo's ranks, then merges learned on the texts of tools and forms. The special
tokens move behind them. A new token starts as the mean of what it is made of.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from perilune.text.prompt.output_format import output_format_message, parse_output_format
from perilune.text.prompt.tools import Toolbox, tool_declaration
from perilune.text.rank_file import read_rank_file
from perilune.text.tokenizer import RANK_FILE, Tokenizer
from train.dictionary import DATA_DIR
from train.ranks import DEMO_DIR, Merger, count_pieces, save_ranks
from train.skills.forms import FormSource
from train.skills.tools import ToolSource

NUM_NEW_RANKS = 256
NUM_TEXTS = 2000
SEED = 11
# Matrices with a row for every token.
VOCABULARY_MATRICES = ("model.embed_tokens.weight", "lm_head.weight")


def new_texts(count: int, seed: int) -> Iterator[str]:
    """What the server writes for tools and forms."""
    rng = random.Random(seed)
    tools, forms = ToolSource(rng, held_out=False), FormSource(rng, held_out=False)
    for _ in range(count):
        declared = Toolbox().declare(tools.dialogue().tools, "tools")
        dialogue = forms.dialogue()
        form = parse_output_format(dialogue.response_format)
        segments = chain(tool_declaration(declared, "tools"), output_format_message(form))
        yield from (segment.text for segment in segments if not segment.is_markup)
        yield str(dialogue.answer["content"])


def grow_ranks(ranks: Mapping[bytes, int], pieces: Mapping[str, int], count: int) -> dict[bytes, int]:
    """`count` more ranks behind the given ones, learned on pieces as the given ones cut them."""
    tokenizer = Tokenizer.from_ranks(ranks)
    grown = dict(ranks)
    merger = Merger(pieces, cut=lambda piece: [tokenizer.token_bytes(i) for i in tokenizer.encode(piece)])
    while len(grown) < len(ranks) + count:
        grown.setdefault(merger.merge(), len(grown))
    return grown


def grow_state(state: Mapping[str, Tensor], old: Tokenizer, new: Tokenizer) -> dict[str, Tensor]:
    """The parameters with a row for each token of `new`, whose ranks begin with those of `old`."""
    num_old, num_new = old.num_ranks, new.num_ranks
    grown = dict(state)
    for name in VOCABULARY_MATRICES:
        rows = state[name]
        made = [rows[old.encode(new.token_bytes(i).decode())].mean(0) for i in range(num_old, num_new)]
        grown[name] = torch.cat((rows[:num_old], torch.stack(made), rows[num_old:]))
    return grown


def main() -> None:
    ranks = grow_ranks(read_rank_file(DEMO_DIR / RANK_FILE), count_pieces(new_texts(NUM_TEXTS, SEED)), NUM_NEW_RANKS)
    save_ranks(ranks, DATA_DIR / RANK_FILE)
    print(f"{len(ranks)} ranks -> {DATA_DIR / RANK_FILE}")


if __name__ == "__main__":
    main()
