"""Exact answers of a model in training on held-out questions, without generating.

Greedy decoding gives the expected answer exactly when every expected token is the likeliest after those before it, so
one forward pass over question and answer decides.
"""

import torch
from torch.nn.utils.rnn import pad_sequence

from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel
from perilune.text.tokenizer import Tokenizer
from train.evaluate import EVALUATED_SKILLS, held_out_questions
from train.questions import Exchange, Question
from train.rows import ChatRenderer, Row
from train.split import FIRST_EVALUATION_SEED

NUM_QUESTIONS = 64
# Not the seeds that figures are published from.
PROBE_SEED = FIRST_EVALUATION_SEED + 999


def held_out_accuracy(model: KimiModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Share of exact answers per skill, thinking off, at temperature 0."""
    shares, renderer = {}, ChatRenderer(tokenizer)
    model.eval()
    for skill in EVALUATED_SKILLS:
        questions = held_out_questions(skill, NUM_QUESTIONS, PROBE_SEED, thinking=False)
        rows = [question_row(question, renderer) for question in questions]
        shares[skill] = _share_exact(model, rows, renderer.pad_id)
    model.train()
    return shares


def question_row(question: Question, renderer: ChatRenderer) -> Row:
    *before, user = (message["content"] for message in question.messages)
    head = renderer.head(before[0] if before else None, None)
    exchange = renderer.exchange(Exchange(user, "", question.answer, question.skill), thinking=False)
    return Row(head.token_ids + exchange.token_ids, head.loss_mask + exchange.loss_mask)


@torch.no_grad()
def _share_exact(model: KimiModel, rows: list[Row], pad_id: int) -> float:
    ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.tensor(row.loss_mask) for row in rows], batch_first=True, padding_value=False)
    best = model(ForwardBatch.whole(ids)).argmax(-1).view_as(ids)
    is_right = (best[:, :-1] == ids[:, 1:]) | ~mask[:, 1:]
    return is_right.all(dim=1).float().mean().item()
