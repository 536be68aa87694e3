"""Reads every matrix of a checkpoint once and says which 8-bit formats would hold it without rounding."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from perilune.checkpoint.check import check_index
from perilune.checkpoint.index import CheckpointIndex, read_index
from perilune.checkpoint.mapped import MappedFile
from perilune.checkpoint.names import TensorFamily
from perilune.checkpoint.precision.exactness import (
    BLOCK_SIZE,
    FORMATS,
    REGIONS,
    Extent,
    bits_lost,
    extent_of_bfloat16,
    extent_of_mxfp4,
    extent_of_values,
)
from perilune.config.model import ModelConfig
from perilune.errors import CheckpointError
from perilune.platform import num_cpus

_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_E8M0_BIAS = 127
_E8M0_NAN = 255
# Values of a matrix that are looked at together; about 60 bytes of memory each.
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Target:
    """A format under one scale per region. `worst_bits` low bits go in the worst value; 0 where nothing is rounded."""

    num_regions: int
    num_rounded: int
    worst_bits: int

    def joined(self, other: "Target") -> "Target":
        return Target(
            self.num_regions + other.num_regions,
            self.num_rounded + other.num_rounded,
            max(self.worst_bits, other.worst_bits),
        )


@dataclass(frozen=True)
class TensorPrecision:
    """One matrix. Exponents are those of the stored scales (MXFP4), else of the largest value of each 32 columns.

    `row_spread` is the widest distance between two of them in one row. `targets`: format, then region.
    """

    name: str
    pattern: str
    part: str
    stored: str
    exponents: tuple[int, int]
    row_spread: int
    targets: dict[str, dict[str, Target]]


def survey(directory: Path, config: ModelConfig) -> Iterator[TensorPrecision]:
    """Every matrix in the order of the files; vectors are left out. Raises CheckpointError, also for NaN and infinity.

    Pages are given back behind each matrix. Shows its progress on a terminal.
    """
    index = read_index(directory)
    families = check_index(index, config)
    names = [name for name in families if not name.endswith(_SCALE) and len(index.entries[name].shape) > 1]
    names.sort(key=lambda name: (index.entries[name].file, index.entries[name].begin))
    files = {file: MappedFile(file) for file in dict.fromkeys(entry.file for entry in index.entries.values())}
    total = sum(index.entries[name].num_bytes for name in names)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="precision", disable=None, leave=False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one for each of the pool: between short ops those of torch would only spin
    try:
        with bar, ThreadPoolExecutor(num_cpus()) as pool:
            for name in names:
                yield _tensor(index, files, name, families[name], pool)
                bar.update(index.entries[name].num_bytes)
    finally:
        torch.set_num_threads(num_threads)


def summarise(tensors: Iterable[TensorPrecision]) -> dict[str, dict[str, Any]]:
    """By pattern of the name, as JSON values: tensors, exponents, widest spread of a row, and the targets."""
    groups: dict[str, dict[str, Any]] = {}
    targets: dict[str, dict[str, dict[str, Target]]] = {}
    for tensor in tensors:
        low, high = tensor.exponents
        group = groups.get(tensor.pattern)
        if group is None:
            kind = {"part": tensor.part, "stored": tensor.stored, "tensors": 1}
            groups[tensor.pattern] = {**kind, "exponents": [low, high], "row_spread": tensor.row_spread}
            targets[tensor.pattern] = tensor.targets
            continue
        group["tensors"] += 1
        group["exponents"] = [min(low, group["exponents"][0]), max(high, group["exponents"][1])]
        group["row_spread"] = max(tensor.row_spread, group["row_spread"])
        targets[tensor.pattern] = _joined(targets[tensor.pattern], tensor.targets)
    return {pattern: {**group, "targets": targets[pattern]} for pattern, group in groups.items()}


def _tensor(
    index: CheckpointIndex, files: dict[Path, MappedFile], name: str, family: TensorFamily, pool: ThreadPoolExecutor
) -> TensorPrecision:
    entry = index.entries[name]
    scale_name = name.removesuffix(_PACKED) + _SCALE
    is_mxfp4 = name.endswith(_PACKED)
    used = [entry, index.entries[scale_name]] if is_mxfp4 else [entry]
    stored = [files[one.file].tensor(one).flatten(1) for one in used]
    rows = stored[0].shape[0]
    step = max(1, _CHUNK_VALUES // (stored[0].shape[1] * (2 if is_mxfp4 else 1)))
    # whole blocks of rows, where a scale is shared by a block
    step = max(BLOCK_SIZE, step - step % BLOCK_SIZE)
    parts = list(
        pool.map(lambda first: _part(name, [tensor[first : first + step] for tensor in stored]), range(0, rows, step))
    )
    for one in used:
        files[one.file].release(one)
    tops, spans = [part.whole for part in parts], [part.span for part in parts]
    leaves = ("top", "largest", "low", "bits")
    whole = Extent(*(torch.stack([getattr(extent, leaf) for extent in tops]) for leaf in leaves))
    shared = _targets(whole, REGIONS[:1])
    by_chunk = reduce(_joined, [part.targets for part in parts])
    found = {target: {**shared[target], **by_chunk[target]} for target in FORMATS}
    held = [span for span in spans if span is not None] or [(0, 0, 0)]
    lowest, highest, spread = min(s[0] for s in held), max(s[1] for s in held), max(s[2] for s in held)
    kind = "mxfp4" if is_mxfp4 else entry.dtype.lower()
    return TensorPrecision(name, family.pattern, str(family.part), kind, (lowest, highest), spread, found)


@dataclass(frozen=True)
class _Part:
    """Some rows of a matrix."""

    whole: Extent
    span: tuple[int, int, int] | None
    targets: dict[str, dict[str, Target]]


def _part(name: str, chunk: list[Tensor]) -> _Part:
    extent = _extent(name, *chunk)
    if len(chunk) == 1:
        span = _span(extent.top, extent.bits)
    else:
        span = _span(chunk[1].int() - _E8M0_BIAS, torch.ones_like(extent.bits))
    return _Part(extent.over("tensor"), span, _targets(extent, REGIONS[1:]))


def _extent(name: str, values: Tensor, scale: Tensor | None = None) -> Extent:
    if scale is not None:
        if bool((scale == _E8M0_NAN).any()):
            raise CheckpointError(f"{name}: its scales hold the byte 255 (NaN); allowed: 0 to 254")
        return extent_of_mxfp4(values, scale)
    if not _is_finite(values):
        raise CheckpointError(f"{name} holds a NaN or an infinity; allowed: finite values")
    return extent_of_bfloat16(values) if values.dtype is torch.bfloat16 else extent_of_values(values)


def _is_finite(values: Tensor) -> bool:
    if values.dtype is torch.bfloat16:  # by patterns, several times faster
        return int((values.view(torch.int16) & 0x7FFF).amax()) < 0x7F80
    return bool(values.isfinite().all())


def _span(exponents: Tensor, bits: Tensor) -> tuple[int, int, int] | None:
    """Lowest, highest, and widest distance in a row, of the groups that hold more than zeros; None without any."""
    is_zero = bits == 0
    if bool(is_zero.all()):
        return None
    high = exponents.masked_fill(is_zero, -(1 << 12)).amax(1)
    low = exponents.masked_fill(is_zero, 1 << 12).amin(1)
    return int(low.min()), int(high.max()), int((high - low).clamp(min=0).max())


def _targets(extent: Extent, regions: tuple[str, ...]) -> dict[str, dict[str, Target]]:
    found: dict[str, dict[str, Target]] = {name: {} for name in FORMATS}
    for region in regions:
        shared = extent.over(region)
        for name, target in FORMATS.items():
            lost = bits_lost(shared, target)
            found[name][region] = Target(lost.numel(), int((lost > 0).sum()), int(lost.max()))
    return found


def _joined(left: dict[str, dict[str, Target]], right: dict[str, dict[str, Target]]) -> dict[str, dict[str, Target]]:
    return {
        name: {region: target.joined(right[name][region]) for region, target in regions.items()}
        for name, regions in left.items()
    }
