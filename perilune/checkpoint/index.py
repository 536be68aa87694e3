"""The checkpoint's directory: which tensor lies in which shard, proven against every shard's header. No torch."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.checkpoint.safetensors import TensorEntry, read_header
from perilune.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointIndex:
    """Every stored tensor of one checkpoint."""

    directory: Path
    entries: dict[str, TensorEntry]
    num_files: int

    @property
    def total_size(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())


def read_index(directory: Path) -> CheckpointIndex:
    """Reads the shard index (or the single file) and all headers; raises CheckpointError where they disagree."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the directory of a checkpoint")
    index_file, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index_file.exists():
        return _read_sharded(directory, index_file)
    if single.exists():
        return CheckpointIndex(directory, read_header(single), 1)
    raise CheckpointError(f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; download the checkpoint again")


def stores_packed(directory: Path) -> bool:
    """Whether a checkpoint has packed matrices, by the names in its index alone; raises CheckpointError."""
    index_file, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if not index_file.exists() and not single.exists():
        raise CheckpointError(
            f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; download the checkpoint again"
        )
    names = _parse_index(index_file)[0] if index_file.exists() else read_header(single)
    return any(name.endswith(".weight_packed") for name in names)


def _read_sharded(directory: Path, index_file: Path) -> CheckpointIndex:
    weight_map, total_size = _parse_index(index_file)
    shards = sorted(set(weight_map.values()))
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(directory / shard).items():
            if weight_map.get(name) != shard:
                place = weight_map.get(name)
                raise CheckpointError(
                    f"{directory / shard} holds {name}, but {INDEX_NAME} "
                    + (f"places it in {place}" if place else "does not list it")
                    + "; shards of different checkpoints are mixed"
                )
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{directory / shard} lacks {name}, which {INDEX_NAME} places there")
    index = CheckpointIndex(directory, entries, len(shards))
    if index.total_size != total_size:
        raise CheckpointError(
            f"{index_file}: metadata.total_size is {total_size}, but the tensors in the shards take {index.total_size}"
        )
    extra = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in set(shards))
    if extra:
        logger.warning("%s is not named in %s and is not read", ", ".join(extra), index_file)
    return index


def _parse_index(index_file: Path) -> tuple[dict[str, str], int]:
    try:
        values: Any = json.loads(index_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index_file} cannot be read as JSON: {error}") from None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    metadata = values.get("metadata") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file} must have a weight_map from tensor names to shard files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index_file} places {name} in {shard!r}; allowed: a .safetensors file beside the index"
            )
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total_size) is not int:
        raise CheckpointError(f"{index_file}: metadata.total_size is {total_size!r}; allowed: the bytes of all tensors")
    return weight_map, total_size
