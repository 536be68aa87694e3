"""Exact answers of a model in training on held-out dialogues, without generating.

Greedy decoding gives the expected answer exactly when every expected token is the likeliest after those before it, so
one forward pass over question and answer decides.
"""

import torch

from perilune.models.model import KimiModel
from perilune.text.tokenizer import Tokenizer
from train.skills.dialogue import DialogueWriter
from train.skills.passes import forward_batch
from train.skills.supply import SKILLS, Collator, held_out_dialogues
from train.split import FIRST_EVALUATION_SEED

NUM_QUESTIONS = 40
# Not the seed that figures are published from.
PROBE_SEED = FIRST_EVALUATION_SEED + 999
RECALL_TOKENS = 256


@torch.no_grad()
def held_out_exactness(model: KimiModel, tokenizer: Tokenizer, count: int = NUM_QUESTIONS) -> dict[str, float]:
    """Share of dialogues per skill whose every answer is exact, thinking off, at temperature 0."""
    model.eval()
    shares = {skill: _share(model, tokenizer, skill, count) for skill in SKILLS}
    model.train()
    return shares


def _share(model: KimiModel, tokenizer: Tokenizer, skill: str, count: int) -> float:
    writer, collate = DialogueWriter(tokenizer), Collator(tokenizer)
    rows = [
        writer.row(dialogue, None)
        for dialogue in held_out_dialogues(skill, count, PROBE_SEED, tokenizer, num_tokens=RECALL_TOKENS)
    ]
    batch = collate(skill, rows, max(len(row.token_ids) for row in rows))
    best = model(forward_batch(model, batch)).argmax(-1).view_as(batch.token_ids)
    is_right = (best[:, :-1] == batch.token_ids[:, 1:]) | ~batch.loss_mask[:, 1:]
    return is_right.all(dim=1).float().mean().item()
