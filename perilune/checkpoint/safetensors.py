"""Reads the header of one safetensors file and proves that the file is whole. No torch, no weights."""

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from perilune.errors import CheckpointError

DTYPE_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor; `begin` and `end` are byte offsets in `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Reads every entry of `file`; raises CheckpointError when the header or the file size is not consistent."""
    size = _file_size(file)
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file} has {size} bytes; a safetensors file has at least 8. Download it again")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} announces a header of {length} bytes; allowed: at most {min(size - 8, MAX_HEADER_BYTES)}. "
                "The file is truncated or altered: download it again"
            )
        text = stream.read(length)
    header = _parse(file, text)
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length) for name, value in header.items()}
    _check_coverage(file, entries, 8 + length, size)
    return entries


def _file_size(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            return stream.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key occurs twice")
        return values

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not valid JSON ({error}); download the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object; download the file again")
    return header


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: {name} must have exactly dtype, shape and data_offsets, found {value!r}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: {name} has shape {shape!r} and data_offsets {offsets!r}; allowed: whole numbers"
        )
    expected, found = prod(shape) * DTYPE_BYTES[dtype], offsets[1] - offsets[0]
    if found != expected:
        raise CheckpointError(
            f"{file}: {name} spans {found} bytes, but {dtype} {shape} takes {expected}; the header is altered"
        )
    return TensorEntry(file, name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(x) is int and x >= 0 for x in values)


def _check_coverage(file: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{file}: {entry.name} begins at byte {entry.begin}, but the tensor before it ends at {position}; "
                "the header is altered"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{file} has {size} bytes, but its header describes {position}; "
            "it is truncated or altered: download it again"
        )
