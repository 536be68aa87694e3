"""Writes the trained model as a checkpoint in the released layout: `python -m train.export --run runs/demo --out DIR`.

The backbone becomes bfloat16, the experts MXFP4, and the indexer selects again. DIR gets the rank file too, so that it
can be served, and the curve of the training. The shipped one lies in `perilune/demo`.
"""

import argparse
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from perilune.checkpoint.writer import released_tensors, write_checkpoint
from perilune.text.tokenizer import RANK_FILE, Tokenizer
from train.dictionary import DATA_DIR
from train.model import demo_config, skilled_config
from train.ranks import DEMO_DIR
from train.run import LOG_FILE, TRAINING_FILE
from train.stage import STAGES

CURVE_FILE = "training.json"


def export(run: Path, out: Path, stage: str | None = None) -> None:
    """Writes the checkpoint of the training in `run`, or of one of its stages, into the empty directory `out`."""
    ranks = DEMO_DIR if stage is None else DATA_DIR
    config = demo_config() if stage is None else skilled_config(Tokenizer.load(ranks).num_ranks)
    state = torch.load(run / (TRAINING_FILE if stage is None else f"{stage}.pt"))["model"]
    write_checkpoint(out, config, released_tensors(config, state))
    shutil.copy(ranks / RANK_FILE, out / RANK_FILE)
    logs = [LOG_FILE] if stage is None else [f"{name}.jsonl" for name in STAGES]
    (out / CURVE_FILE).write_text(json.dumps(curve([run / name for name in logs]), indent=1) + "\n")


def curve(logs: Iterable[Path]) -> list[dict[str, object]]:
    """The entries that hold a probe of held-out questions, oldest first; a log that is not there has none."""
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    return [entry for entry in map(json.loads, lines) if "exact" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, help="of `train.stage`; without it what `train.run` trained")
    arguments = parser.parse_args()
    export(arguments.run, arguments.out, arguments.stage)


if __name__ == "__main__":
    main()
