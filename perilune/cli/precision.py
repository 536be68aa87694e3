"""What `perilune inspect --precision` prints."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.checkpoint.precision.survey import TensorPrecision

_EXACT = "lossless"


def precision_report(directory: Path, *, with_tensors: bool) -> dict[str, Any]:
    """The summary by pattern, and on demand every matrix, as JSON values; raises CheckpointError."""
    from perilune.checkpoint.precision.survey import summarise, survey
    from perilune.config.parse import load_model_config

    tensors: Iterable[TensorPrecision] = survey(directory, load_model_config(directory))
    if with_tensors:
        tensors = list(tensors)
    summary = {
        pattern: {**group, "targets": {name: _plain(regions) for name, regions in group["targets"].items()}}
        for pattern, group in summarise(tensors).items()
    }
    if not with_tensors:
        return {"summary": summary}
    return {"summary": summary, "tensors": [asdict(tensor) for tensor in tensors]}


def render_precision(report: dict[str, Any]) -> str:
    """The summary as a table for people."""
    lines = [
        "Formats under one power of two per tensor, channel (row), block (128 x 128) or group (32 columns).",
        "-3b 12.5%: that share of the scaled regions would be rounded, the worst value by 3 bits.",
    ]
    for pattern, group in report["summary"].items():
        low, high = group["exponents"]
        regions = next(iter(group["targets"].values()))
        stored = f"{pattern}: {group['tensors']:,} x {group['stored']}"
        lines += ["", f"{stored}, exponents {low} to {high}, widest in a row {group['row_spread']}"]
        lines.append(f"  {'':<10}" + "".join(f"{region:>16}" for region in regions))
        for name, found in group["targets"].items():
            lines.append(f"  {name:<10}" + "".join(f"{_shown(target):>16}" for target in found.values()))
    return "\n".join(lines)


def _plain(regions: dict[str, Any]) -> dict[str, Any]:
    return {region: asdict(target) for region, target in regions.items()}


def _shown(target: dict[str, int]) -> str:
    if target["num_rounded"] == 0:
        return _EXACT
    return f"-{target['worst_bits']}b {target['num_rounded'] / target['num_regions']:.1%}"
