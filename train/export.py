"""Writes the trained model as a checkpoint in the released layout: `python -m train.export --run runs/demo --out DIR`.

The backbone becomes bfloat16, the experts MXFP4, and the indexer selects again. DIR gets the rank file too, so that it
can be served; the shipped one lies in `perilune/demo`.
"""

import argparse
import shutil
from pathlib import Path

import torch

from perilune.checkpoint.writer import released_tensors, write_checkpoint
from perilune.text.tokenizer import RANK_FILE
from train.model import demo_config
from train.ranks import DEMO_DIR
from train.run import TRAINING_FILE


def export(run: Path, out: Path) -> None:
    """Writes the checkpoint of the training in `run` into the new or empty directory `out`."""
    state = torch.load(run / TRAINING_FILE)["model"]
    config = demo_config()
    write_checkpoint(out, config, released_tensors(config, state))
    shutil.copy(DEMO_DIR / RANK_FILE, out / RANK_FILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
