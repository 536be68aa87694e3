"""Everything from the shipped demo to its successor: `python -m train.demo --out runs/demo --minutes 240`.

All stages one after the other, the checkpoint (`<out>/checkpoint`), its draft (`<out>/checkpoint/draft`) and the curve
of every stage as a picture. The same command goes on after an interruption. What came out is measured by
`perilune verify quality <out>/checkpoint`.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from perilune.config.engine import DEMO_CHECKPOINT
from train import curve, draft, export, stage
from train.fusion import fuse_ops
from train.skills.prompts import save_prompts

# How the time is divided among the stages; the draft's length is counted in steps.
TIME: Mapping[str, float] = {"text": 0.5, "pictures": 0.3, "experts": 0.1, "indexer": 0.1}
NUM_ANSWERS, NUM_DRAFT_STEPS = 8192, 3000
CHECKPOINT_DIR, DRAFT_RUN, PROMPTS_FILE = "checkpoint", "draft", "prompts.jsonl"
SEED = 1


def train(out: Path, start: Path, minutes: float) -> None:
    """Runs, or goes on with, the whole."""
    assert list(TIME) == list(stage.STAGES)
    fuse_ops()
    for number, (name, share) in enumerate(TIME.items()):
        stage.train(name, out, start if number == 0 else None, minutes * share, SEED)
        draw(out / f"{name}.jsonl")
    checkpoint = out / CHECKPOINT_DIR
    if not checkpoint.exists():
        partial = out / f"{CHECKPOINT_DIR}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        export.export(out, partial, list(TIME)[-1])
        partial.rename(checkpoint)
    add_draft(out, checkpoint)


def add_draft(out: Path, checkpoint: Path) -> None:
    """Trains the checkpoint's draft and puts it beside it."""
    prompts = out / PROMPTS_FILE
    if not prompts.exists():
        save_prompts(NUM_ANSWERS, SEED, prompts)
    draft.train(
        checkpoint,
        out / DRAFT_RUN,
        num_steps=NUM_DRAFT_STEPS,
        num_answers=NUM_ANSWERS,
        prompts=prompts,
        size=draft.Size(),
    )
    shutil.copytree(out / DRAFT_RUN / draft.DRAFT_DIR, checkpoint / "draft", dirs_exist_ok=True)


def draw(log: Path) -> None:
    """The curves of one stage, as a picture beside its log."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    log.with_suffix(".svg").write_text(curve.draw(entries, log.stem), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--start", type=Path, default=DEMO_CHECKPOINT, help="checkpoint to begin with")
    parser.add_argument("--minutes", type=float, default=240.0, help="of all stages together")
    arguments = parser.parse_args()
    train(arguments.out, arguments.start, arguments.minutes)


if __name__ == "__main__":
    main()
