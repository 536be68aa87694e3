"""Writes the trained model as a checkpoint in the released layout: `python -m train.export --run runs/demo --out DIR`.

The backbone becomes bfloat16, the experts MXFP4, and the indexer selects again. DIR gets the rank file too, so that it
can be served, and the curve of the training. The shipped one lies in `perilune/demo`.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from perilune.checkpoint.writer import released_tensors, write_checkpoint
from perilune.text.tokenizer import RANK_FILE
from train.model import demo_config
from train.ranks import DEMO_DIR
from train.run import LOG_FILE, TRAINING_FILE

CURVE_FILE = "training.json"


def export(run: Path, out: Path) -> None:
    """Writes the checkpoint of the training in `run` into the new or empty directory `out`."""
    state = torch.load(run / TRAINING_FILE)["model"]
    config = demo_config()
    write_checkpoint(out, config, released_tensors(config, state))
    shutil.copy(DEMO_DIR / RANK_FILE, out / RANK_FILE)
    (out / CURVE_FILE).write_text(json.dumps(curve(run), indent=1) + "\n")


def curve(run: Path) -> list[dict[str, object]]:
    """The log entries that hold a probe of held-out questions, oldest first."""
    entries = [json.loads(line) for line in (run / LOG_FILE).read_text().splitlines()]
    return [entry for entry in entries if "exact" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
