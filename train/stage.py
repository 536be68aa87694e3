"""Trains one stage of the demo: `python -m train.stage text --out runs/demo --start perilune/demo --minutes 60`.

The same command resumes it. Time is what the processors gave it, so that pauses and other work do not end it early;
`--minutes` are those of a machine that does nothing else. Stages, in their order: text, pictures, experts, indexer;
each goes on from the one before it in the same directory, or from the checkpoint that `--start` names. Progress goes to
a bar, losses and exact answers to `<out>/<stage>.jsonl`, weights every two minutes to `<out>/<stage>.pt`. The draft has
a command of its own (`train/draft.py`), the checkpoint is written by `train/export.py`, the curves are drawn by
`train/curve.py`.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from perilune.checkpoint.names import VISION_PREFIX
from perilune.models.dsa import Indexer
from perilune.models.model import KimiModel
from perilune.models.moe import TrainableExperts
from perilune.text.tokenizer import Tokenizer
from train.dictionary import DATA_DIR
from train.fusion import fuse_ops
from train.indexer import IndexerTeacher
from train.model import INDEX_TOPK, skilled_config
from train.optimizer import optimizers_of
from train.run import RouterBalance, _save
from train.skills.exactness import held_out_exactness
from train.skills.passes import answer_loss
from train.skills.supply import Batches, SkillBatch
from train.start import started_model

MATRIX_LR, OTHER_LR, WEIGHT_DECAY = 5e-3, 3e-3, 0.01
SAVE_EVERY_S, PROBE_EVERY_S = 120.0, 300.0
NUM_INDEXED_SEQUENCES = 2
WARM_UP = 0.02


@dataclass(frozen=True)
class Stage:
    """What a stage is fed (shares of batches by kind) and what of the model takes part.

    `rate` is of the full learning rates, `eyes` of those of the vision tower. Experts are rounded to MXFP4 from the
    share `rounds_from` of the time on. The indexer learns from the share `indexes_from` on, and from `selects_from` on
    attention sees what it selects only.
    """

    shares: Mapping[str, float]
    rate: float
    eyes: float = 0.0
    rounds_from: float = 0.0
    indexes_from: float = 1.0
    selects_from: float = 1.0


STAGES: Mapping[str, Stage] = {
    "text": Stage(
        {"chat": 0.24, "talk": 0.02, "tools": 0.3, "json": 0.24, "recall": 0.2},
        rate=0.4,
        rounds_from=0.6,
    ),
    "pictures": Stage(
        {"chat": 0.15, "talk": 0.02, "tools": 0.1, "json": 0.1, "recall": 0.15, "pictures": 0.5},
        rate=0.2,
        eyes=1.0,
    ),
    "experts": Stage(
        {"chat": 0.23, "talk": 0.02, "tools": 0.2, "json": 0.15, "recall": 0.2, "pictures": 0.2},
        rate=0.1,
        eyes=0.1,
    ),
    "indexer": Stage(
        {"chat": 0.18, "talk": 0.02, "tools": 0.2, "json": 0.1, "recall": 0.3, "recall 2k": 0.1, "pictures": 0.1},
        rate=0.05,
        indexes_from=0.0,
        selects_from=0.5,
    ),
}


class StageRun:
    """Model, optimizers and clock of one stage; `state` and `restore` carry it over an interruption."""

    def __init__(self, stage: Stage, model: KimiModel, budget_s: float):
        self.stage, self.model, self.budget_s = stage, model, budget_s
        named = list(model.named_parameters())
        seeing = [(name, parameter) for name, parameter in named if name.startswith(VISION_PREFIX)]
        parts = [([item for item in named if not item[0].startswith(VISION_PREFIX)], stage.rate)]
        if stage.eyes:
            parts.append((seeing, stage.eyes))
        for _, parameter in seeing:
            parameter.requires_grad_(stage.eyes > 0)
        self.optimizers = [
            optimizer
            for part, rate in parts
            for optimizer in optimizers_of(part, MATRIX_LR * rate, OTHER_LR * rate, WEIGHT_DECAY)
        ]
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.balance = RouterBalance(model)
        self.teacher: IndexerTeacher | None = None
        self.spent_s, self.num_steps, self.num_tokens = 0.0, 0, 0

    @property
    def progress(self) -> float:
        return min(self.spent_s / self.budget_s, 1.0)

    def step(self, batch: SkillBatch) -> dict[str, float]:
        """One update; returns the losses."""
        self._set_model()
        loss = answer_loss(self.model, batch)
        losses = {"loss": loss}
        if self.teacher is not None:
            losses["indexer_loss"] = self.teacher.take_loss()
        torch.stack(list(losses.values())).sum().backward()
        factor = max(min(1.0, self.progress / WARM_UP + 0.05, (1 - self.progress) * 1.3), 0.03)
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.balance.update()
        self.num_steps += 1
        self.num_tokens += batch.token_ids.numel()
        return {name: value.item() for name, value in losses.items()}

    def _set_model(self) -> None:
        for module in self.model.modules():
            if isinstance(module, TrainableExperts):
                module.rounds_weights = self.progress >= self.stage.rounds_from
            elif isinstance(module, Indexer) and self.progress >= self.stage.selects_from:
                module.config = replace(module.config, topk=INDEX_TOPK)
        if self.progress >= self.stage.indexes_from and self.teacher is None:
            self.teacher = IndexerTeacher(self.model, NUM_INDEXED_SEQUENCES)

    def state(self) -> dict[str, object]:
        """Everything needed to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "clock": (self.spent_s, self.num_steps, self.num_tokens),
        }

    def restore(self, state: dict[str, object]) -> None:
        """Takes over what `state` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):  # type: ignore[call-overload]
            optimizer.load_state_dict(saved)
        self.spent_s, self.num_steps, self.num_tokens = state["clock"]  # type: ignore[misc]


def file_before(name: str, out: Path) -> Path | None:
    """What the stage before this one left; None for the first."""
    number = list(STAGES).index(name)
    return out / f"{list(STAGES)[number - 1]}.pt" if number else None


def train(name: str, out: Path, start: Path | None, minutes: float, seed: int) -> StageRun:
    """Runs, or goes on with, a stage in `out` until its time is spent."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(DATA_DIR)
    model = started_model(skilled_config(tokenizer.num_ranks), start, tokenizer, seed)
    before = file_before(name, out)
    if start is None and before is not None:
        model.load_state_dict(torch.load(before)["model"])
    run = StageRun(STAGES[name], model, minutes * 60)
    saved = out / f"{name}.pt"
    if saved.exists():
        run.restore(torch.load(saved))
    batches = iter(Batches(seed * 1000 + run.num_steps, tokenizer, run.stage.shares))
    with (out / f"{name}.jsonl").open("a") as log, tqdm(total=run.budget_s, unit="s", initial=run.spent_s) as bar:
        last_save = last_probe = run.spent_s
        while run.progress < 1.0:
            began = time.process_time()
            batch = next(batches)
            losses = run.step(batch)
            run.spent_s += (time.process_time() - began) / torch.get_num_threads()
            bar.update(min(run.spent_s, run.budget_s) - bar.n)
            bar.set_postfix(step=run.num_steps, **{key: f"{loss:.3f}" for key, loss in losses.items()})
            record: dict[str, object] = {"step": run.num_steps, "spent_s": run.spent_s, "tokens": run.num_tokens}
            record |= {"kind": batch.kind, **losses}
            if run.spent_s - last_probe > PROBE_EVERY_S or run.progress >= 1.0:
                record["exact"] = held_out_exactness(run.model, tokenizer)
                last_probe = run.spent_s
                bar.write(json.dumps(record))
            log.write(json.dumps(record) + "\n")
            log.flush()
            if run.spent_s - last_save > SAVE_EVERY_S or run.progress >= 1.0:
                _save(run.state(), saved)
                last_save = run.spent_s
    return run


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--start", type=Path, help="checkpoint to go on from instead of the stage before")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(given)
    before = file_before(arguments.stage, arguments.out)
    if arguments.start is None and before is not None and not before.exists():
        parser.error(f"{before} does not exist: run the stage before {arguments.stage} first, or name a --start")
    fuse_ops()
    train(arguments.stage, arguments.out, arguments.start, arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
