"""Trains the demo model: `python -m train.run --out runs/demo --minutes 75`; the same command resumes it.

The learning rates, the curriculum and the indexer's stage follow the share of the time that has been spent, so that a
slower machine sees fewer tokens and still ends with a finished model. Progress, losses and exact answers on held-out
questions go to `<out>/log.jsonl`.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from perilune.config.model import ModelConfig
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel
from perilune.models.moe import Router, TrainableExperts
from perilune.text.tokenizer import Tokenizer
from train.fusion import fuse_ops
from train.indexer import IndexerTeacher
from train.model import demo_config, initialised_model
from train.optimizer import optimizers
from train.probe import held_out_accuracy
from train.questions import DEFAULT_MIX, THINKING_SHARE, Drill
from train.ranks import DEMO_DIR
from train.rows import DEFAULT_ROW_LENGTH, Batch, batches

TRAINING_FILE, LOG_FILE = "training.pt", "log.jsonl"
BATCH_SIZE = 16
MATRIX_LR, OTHER_LR = 5e-3, 3e-3
WEIGHT_DECAY = 0.01
ROUTER_BIAS_STEP = 1e-3
# Shares of the time: warm-up of the rates, start of their decline, full curriculum, MXFP4 rounding, indexer's stage.
WARM_UP, DECLINE, FULL_LEVEL, ROUNDING, INDEXING = 0.01, 0.35, 0.5, 0.6, 0.8
NUM_INDEXED_SEQUENCES = 4
ROWS_MULTIPLE = 1024
IGNORED_TARGET = -100  # cross_entropy leaves it out
SAVE_EVERY_S, PROBE_EVERY_S = 120.0, 300.0


@dataclass(frozen=True)
class Stage:
    """What is asked up to a share of the time."""

    until: float
    mix: Mapping[str, float]
    drill: Drill
    thinking_share: float = THINKING_SHARE


# Definitions need some fifty repetitions, sums a drill, recall most of the end; thinking can wait for the last tenth.
STAGES = (
    Stage(0.35, DEFAULT_MIX, Drill()),
    Stage(0.5, {"dictionary": 0.48, "sums": 0.30, "recall": 0.20, "talk": 0.02}, Drill()),
    Stage(0.7, {"dictionary": 0.26, "sums": 0.42, "recall": 0.30, "talk": 0.02}, Drill(share=0.8, most=8)),
    Stage(0.78, {"dictionary": 0.42, "sums": 0.22, "recall": 0.34, "talk": 0.02}, Drill(share=0.6, most=8)),
    Stage(0.9, {"dictionary": 0.28, "sums": 0.16, "recall": 0.54, "talk": 0.02}, Drill(share=0.6, most=8)),
    Stage(1.0, {"dictionary": 0.64, "sums": 0.12, "recall": 0.22, "talk": 0.02}, Drill(), thinking_share=0.8),
)


def rate_factor(progress: float) -> float:
    """Share of the full learning rate after `progress` (0 to 1) of the time: up, level, and down to 2 %."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.02)
    return min(1.0, max((1 - progress) / (1 - DECLINE), 0.02))


class Training:
    """Model, optimizers and clock of one run; `state` and `restore` carry it over an interruption."""

    def __init__(self, config: ModelConfig, seed: int, budget_s: float):
        self.budget_s = budget_s
        self.model = initialised_model(config, seed)
        self.optimizers = optimizers(self.model, MATRIX_LR, OTHER_LR, WEIGHT_DECAY)
        self.base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.balance = RouterBalance(self.model)
        self.teacher: IndexerTeacher | None = None
        self.spent_s, self.num_steps = 0.0, 0

    @property
    def progress(self) -> float:
        return min(self.spent_s / self.budget_s, 1.0)

    def step(self, ids: Tensor, mask: Tensor) -> dict[str, float]:
        """One update on ids [B, L] with targets where mask [B, L] is true; returns the losses."""
        self._set_stage()
        rows, targets = _targets(ids, mask)
        answer_loss = F.cross_entropy(self.model(ForwardBatch.whole(ids, rows)), targets, ignore_index=IGNORED_TARGET)
        losses = {"loss": answer_loss}
        if self.teacher is not None:
            losses["indexer_loss"] = self.teacher.take_loss()
        torch.stack(list(losses.values())).sum().backward()
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor(self.progress)
            optimizer.step()
            optimizer.zero_grad()
        self.balance.update()
        self.num_steps += 1
        return {name: loss.item() for name, loss in losses.items()}

    def _set_stage(self) -> None:
        for module in self.model.modules():
            if isinstance(module, TrainableExperts):
                module.rounds_weights = self.progress >= ROUNDING
        if self.progress >= INDEXING and self.teacher is None:
            self.teacher = IndexerTeacher(self.model, NUM_INDEXED_SEQUENCES)

    def state(self) -> dict[str, object]:
        """Everything needed to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "spent_s": self.spent_s,
            "num_steps": self.num_steps,
        }

    def restore(self, state: dict[str, object]) -> None:
        """Takes over what `state` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):  # type: ignore[call-overload]
            optimizer.load_state_dict(saved)
        self.spent_s, self.num_steps = float(state["spent_s"]), int(state["num_steps"])  # type: ignore[call-overload, arg-type]


class RouterBalance:
    """Keeps experts evenly used: the correction bias of one chosen more often than the average falls, else it rises.

    Auxiliary-loss-free balancing (arXiv 2408.15664).
    """

    def __init__(self, model: KimiModel):
        self._chosen: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.requires_grad_(False)
                module.register_forward_hook(self._count)

    def _count(self, router: Router, _: object, output: tuple[Tensor, Tensor]) -> None:
        if router.training:
            self._chosen[router] = torch.bincount(output[0].flatten(), minlength=router.weight.shape[0]).float()

    def update(self) -> None:
        """Moves the biases by one step according to the last training pass."""
        for router, counts in self._chosen.items():
            router.e_score_correction_bias.data.sub_(ROUTER_BIAS_STEP * torch.sign(counts - counts.mean()))


class QuestionStream:
    """Batches for a training: the curriculum's level and the stage follow its progress.

    After an interruption a fresh part of the questions comes.
    """

    def __init__(self, training: Training, tokenizer: Tokenizer, seed: int):
        self._training, self._tokenizer, self._seed = training, tokenizer, seed
        self._stage: Stage | None = None
        self._batches: Iterator[Batch] | None = None

    def __next__(self) -> tuple[Tensor, Tensor]:
        stage = next(stage for stage in STAGES if self._training.progress <= stage.until)
        if stage is not self._stage:
            self._stage = stage
            self._batches = batches(
                self._seed + self._training.num_steps,
                self._tokenizer,
                BATCH_SIZE,
                level=lambda _: min(self._training.progress / FULL_LEVEL, 1.0),
                mix=stage.mix,
                drill=stage.drill,
                thinking_share=stage.thinking_share,
            )
        assert self._batches is not None
        ids, mask = next(self._batches)
        return torch.from_numpy(ids), torch.from_numpy(mask)


def _targets(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Flat indices of the tokens that predict a target, and the targets; few sizes, as each is compiled anew."""
    rows = F.pad(mask[:, 1:], (0, 1)).flatten().nonzero().squeeze(1)
    targets = ids.flatten()[rows + 1]
    missing = -len(rows) % ROWS_MULTIPLE
    return F.pad(rows, (0, missing)), F.pad(targets, (0, missing), value=IGNORED_TARGET)


def train(out: Path, seed: int, minutes: float) -> Training:
    """Runs, or goes on with, the training in `out` until its time is spent."""
    out.mkdir(parents=True, exist_ok=True)
    saved = out / TRAINING_FILE
    training = Training(demo_config(), seed, minutes * 60)
    tokenizer = Tokenizer.load(DEMO_DIR)
    if saved.exists():
        training.restore(torch.load(saved))
    fuse_ops()
    questions = QuestionStream(training, tokenizer, seed)
    last_save = last_probe = training.spent_s
    with (out / LOG_FILE).open("a") as log, tqdm(total=training.budget_s, unit="s", initial=training.spent_s) as bar:
        while training.progress < 1.0:
            began = time.monotonic()
            losses = training.step(*next(questions))
            training.spent_s += time.monotonic() - began
            bar.update(min(training.spent_s, training.budget_s) - bar.n)
            bar.set_postfix(step=training.num_steps, **{name: f"{loss:.3f}" for name, loss in losses.items()})
            record: dict[str, object] = {"step": training.num_steps, "spent_s": training.spent_s, **losses}
            record["tokens"] = training.num_steps * BATCH_SIZE * DEFAULT_ROW_LENGTH
            if training.spent_s - last_probe > PROBE_EVERY_S or training.progress >= 1.0:
                record["exact"] = held_out_accuracy(training.model, tokenizer)
                last_probe = training.spent_s
                bar.write(json.dumps(record))
            log.write(json.dumps(record) + "\n")
            log.flush()
            if training.spent_s - last_save > SAVE_EVERY_S or training.progress >= 1.0:
                _save(training.state(), saved)
                last_save = training.spent_s
    return training


def _save(state: dict[str, object], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.out, arguments.seed, arguments.minutes)


if __name__ == "__main__":
    main()
