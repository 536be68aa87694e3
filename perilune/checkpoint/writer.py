"""Writes a checkpoint in the released layout: tensors in any order, one at a time, never the whole model in memory.

Layer L goes to shard L + 1, then come the globals, the projector and the vision tower. The index is written last,
so that an interrupted write is not mistaken for a checkpoint.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from perilune.checkpoint.index import INDEX_NAME
from perilune.checkpoint.mapped import TORCH_DTYPES
from perilune.checkpoint.names import Part, TensorFamily, TensorTable, layer_of, parameter_name, tensor_table
from perilune.config.model import ModelConfig
from perilune.config.parse import model_config_to_dict
from perilune.errors import CheckpointError
from perilune.ops.mxfp4.reference import mxfp4_quantize

# Wide elements first: with an aligned header every tensor is then aligned to its element.
_DTYPE_ORDER = ("F32", "BF16", "U8")


@dataclass
class _Shard:
    path: Path
    offsets: dict[str, int]  # where each tensor's bytes begin in the file
    unwritten: set[str]


def write_checkpoint(directory: Path, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes config.json, the shards and their index; `tensors` are (released name, tensor of the released dtype).

    Raises CheckpointError when `directory` is not empty, or a tensor is unknown, of the wrong form, or missing.
    """
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty; give a new or an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model_config_to_dict(config), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    table = tensor_table(config)
    shards = _create_shards(directory, table)
    shard_of = {name: shard for shard in shards for name in shard.offsets}
    for name, tensor in tensors:
        shard, family = shard_of.get(name), table.find(name)
        if shard is None or family is None:
            raise CheckpointError(f"{name} is not a tensor of the released layout of this configuration")
        _write_tensor(shard, name, family, tensor)
    _write_index(directory, table, shards)


def released_tensors(config: ModelConfig, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the released layout from the parameters of a trainable model, by name.

    Everything is cast to the released dtype; stacked experts `...experts.w1` [E, out, in] become MXFP4 one by one.
    Raises CheckpointError for a parameter that is missing.
    """
    for name, family in tensor_table(config).released():
        if family.part is not Part.EXPERTS:
            # the model flattens the patch embedding's filters
            tensor = _find(parameters, parameter_name(name)).detach().view(family.shape)
            yield name, tensor.to(TORCH_DTYPES[family.dtypes[0]])
        elif name.endswith(".weight_packed"):
            base = name.removesuffix(".weight_packed")
            experts, expert, weight = parameter_name(base).rsplit(".", 2)
            packed, scale = mxfp4_quantize(_find(parameters, f"{experts}.{weight}")[int(expert)].detach())
            yield f"{base}.weight_packed", packed
            yield f"{base}.weight_scale", scale


def _find(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parameters:
        raise CheckpointError(f"parameter {name} is missing; the released layout of this configuration requires it")
    return parameters[name]


def _create_shards(directory: Path, table: TensorTable) -> list[_Shard]:
    groups: dict[int, list[tuple[str, TensorFamily]]] = {}
    for name, family in table.released():
        groups.setdefault(_shard_rank(name, family, table), []).append((name, family))
    shards = []
    for number, rank in enumerate(sorted(groups), start=1):
        path = directory / f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        shards.append(_create_shard(path, groups[rank]))
    return shards


def _shard_rank(name: str, family: TensorFamily, table: TensorTable) -> int:
    layer = layer_of(name)
    if layer is not None:
        return layer
    return table.num_layers + {Part.PROJECTOR: 1, Part.VISION: 2}.get(family.part, 0)


def _create_shard(path: Path, members: list[tuple[str, TensorFamily]]) -> _Shard:
    members = sorted(members, key=lambda member: _DTYPE_ORDER.index(member[1].dtypes[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    for name, family in members:
        end = position + family.tensor_bytes
        header[name] = {"dtype": family.dtypes[0], "shape": family.shape, "data_offsets": [position, end]}
        offsets[name], position = position, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + position)
    return _Shard(path, {name: 8 + len(text) + begin for name, begin in offsets.items()}, set(offsets))


def _write_tensor(shard: _Shard, name: str, family: TensorFamily, tensor: Tensor) -> None:
    dtype = TORCH_DTYPES[family.dtypes[0]]
    if tuple(tensor.shape) != family.shape or tensor.dtype != dtype:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}; allowed: {list(family.shape)} and {dtype}"
        )
    if name not in shard.unwritten:
        raise CheckpointError(f"{name} is given twice")
    shard.unwritten.remove(name)
    with shard.path.open("r+b") as stream:
        stream.seek(shard.offsets[name])
        _write_bytes(stream, tensor)


def _write_bytes(stream: BinaryIO, tensor: Tensor) -> None:
    stream.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_index(directory: Path, table: TensorTable, shards: list[_Shard]) -> None:
    for shard in shards:
        for name in sorted(shard.unwritten)[:1]:
            raise CheckpointError(f"{name} was not given; the released layout of this configuration requires it")
    index = {
        "metadata": {"total_size": sum(family.tensor_bytes for _, family in table.released())},
        "weight_map": {name: shard.path.name for shard in shards for name in shard.offsets},
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
