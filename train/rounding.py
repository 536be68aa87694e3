"""What each way of rounding changes in a trained model: its logits over held-out conversations beside exact ones.

    python -m train.rounding --questions 100 --backend native

The exact ones are those of the reference in float32. Answers are judged as in `train/probe.py`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
from perilune.engine.build import load_model
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel
from perilune.ops.registry import apply_overrides
from perilune.text.tokenizer import Tokenizer
from perilune.verify.logits import only
from train.evaluate import EVALUATED_SKILLS, held_out_questions
from train.probe import question_row
from train.rows import ChatRenderer, Row
from train.split import FIRST_EVALUATION_SEED

BATCH = 20
WEIGHTS_AND_ACTIVATIONS = (
    ("stored", "exact"),
    ("stored", "int8"),
    ("int8", "exact"),
    ("int8", "int8"),
    ("fp8", "exact"),
)


@dataclass(frozen=True)
class Distance:
    """Mean KL from the exact distribution in nats, over the tokens of answers and over all; exact answers by skill."""

    answer_kl: float
    kl: float
    exact: tuple[int, ...]


def held_out_rows(checkpoint: Path, count: int) -> dict[str, list[Row]]:
    """`count` conversations of each skill, thinking off."""
    renderer = ChatRenderer(Tokenizer.load(checkpoint))
    return {
        skill: [
            question_row(question, renderer)
            for question in held_out_questions(skill, count, FIRST_EVALUATION_SEED, thinking=False)
        ]
        for skill in EVALUATED_SKILLS
    }


def exact_logits(checkpoint: Path, rows: dict[str, list[Row]]) -> list[Tensor]:
    """Logits [T, vocab] of every row by the reference in float32."""
    return list(_logits(load_model(checkpoint, EngineConfig(dtype="float32", ops=only("reference"))), rows))


def measure(checkpoint: Path, config: EngineConfig, rows: dict[str, list[Row]], exact: Sequence[Tensor]) -> Distance:
    """How far the model is from the exact logits when it is loaded as `config` says."""
    answer_kls, kls, is_right = [], [], []
    flat = [row for own in rows.values() for row in own]
    for row, right_TV, ours_TV in zip(flat, exact, _logits(load_model(checkpoint, config), rows), strict=True):
        right, ours = right_TV.double().log_softmax(-1), ours_TV.double().log_softmax(-1)
        kl_T = (right.exp() * (right - ours)).sum(-1)
        is_answer = torch.tensor(row.loss_mask)[1:]
        kls.append(kl_T)
        answer_kls.append(kl_T[:-1][is_answer])
        is_right.append(bool(((ours[:-1].argmax(-1) == torch.tensor(row.token_ids)[1:]) | ~is_answer).all()))
    counts = torch.tensor(is_right).view(len(rows), -1).sum(-1).tolist()
    return Distance(float(torch.cat(answer_kls).mean()), float(torch.cat(kls).mean()), tuple(counts))


@torch.inference_mode()
def _logits(model: KimiModel, rows: dict[str, list[Row]]) -> Iterator[Tensor]:
    for own in rows.values():
        for first in range(0, len(own), BATCH):
            part = own[first : first + BATCH]
            ids = pad_sequence([torch.tensor(row.token_ids) for row in part], batch_first=True)
            logits = model(ForwardBatch.whole(ids)).float().view(*ids.shape, -1)
            yield from (piece[: len(row.token_ids)] for piece, row in zip(logits, part, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, help="per skill")
    parser.add_argument("--backend", default="native", help="computes what it implements: native or reference")
    args = parser.parse_args(arguments)
    rows = held_out_rows(DEMO_CHECKPOINT, args.questions)
    exact = exact_logits(DEMO_CHECKPOINT, rows)
    print(f"{'dtype':<10}{'weights':<8}{'activations':<12}{'KL of answers':>14}{'KL of all':>11}  {', '.join(rows)}")
    for dtype in ("float32", "bfloat16"):
        for weights, activations in WEIGHTS_AND_ACTIVATIONS:
            config = EngineConfig(dtype=dtype, dense_weights=weights, activations=activations, ops=only(args.backend))
            found = measure(DEMO_CHECKPOINT, config, rows, exact)
            counts = ", ".join(map(str, found.exact))
            print(f"{dtype:<10}{weights:<8}{activations:<12}{found.answer_kl:>14.1e}{found.kl:>11.1e}  {counts}")
    apply_overrides({})
    return 0


if __name__ == "__main__":
    sys.exit(main())
