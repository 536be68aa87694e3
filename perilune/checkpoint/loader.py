"""Maps the weights of a checkpoint into memory without copying them, after every check that the headers allow."""

import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from perilune.checkpoint.check import check_index
from perilune.checkpoint.index import read_index
from perilune.checkpoint.names import VISION_PARTS, Part, TensorFamily, parameter_name
from perilune.checkpoint.safetensors import TensorEntry
from perilune.config.model import ModelConfig
from perilune.errors import CheckpointError

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def load_state(directory: Path, config: ModelConfig, *, check_scales: bool = False) -> dict[str, Tensor]:
    """Maps every text tensor: parameter name (the stored one without `language_model.`) -> read-only tensor.

    Shapes and dtypes are those stored: `A_log` keeps its zero tail, experts stay packed. A missing indexer
    `k_norm.bias` comes as zeros. Vision tensors are checked but not mapped. `check_scales` also reads every
    MXFP4 scale. Raises CheckpointError.
    """
    index = read_index(directory)
    families = check_index(index, config)
    text = {name: family for name, family in families.items() if family.part not in VISION_PARTS}
    stored = map_tensors(index.entries[name] for name in text)
    check_values(stored, text, config, check_scales=check_scales)
    state = {parameter_name(name): tensor for name, tensor in stored.items()}
    if config.indexer is not None:
        for layer in config.full_attn_layers:
            prefix = f"model.layers.{layer}.self_attn.indexer.k_norm."
            if prefix + "bias" not in state:
                state[prefix + "bias"] = torch.zeros_like(state[prefix + "weight"])
    return state


def map_tensors(entries: Iterable[TensorEntry]) -> dict[str, Tensor]:
    """Maps the given entries: stored name -> tensor that shares the file's pages (a copy where it is misaligned)."""
    shards: dict[Path, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if entry.file not in shards:
            shards[entry.file] = _map_file(entry.file)
        tensors[entry.name] = _view(shards[entry.file], entry)
    return tensors


def check_values(
    stored: dict[str, Tensor], families: dict[str, TensorFamily], config: ModelConfig, *, check_scales: bool
) -> None:
    """Proves what headers cannot: zeros behind the heads of `A_log`, and (on demand) no NaN among the scales."""
    for name, tensor in stored.items():
        family = families[name]
        if family.part is Part.KDA and name.endswith(".A_log") and bool(tensor[config.kda.num_heads :].any()):
            raise CheckpointError(
                f"{name} has a value other than 0 behind its {config.kda.num_heads} heads; allowed: zeros"
            )
        if check_scales and name.endswith(".weight_scale") and bool((tensor == 255).any()):
            raise CheckpointError(f"{name} holds the scale byte 255 (NaN); allowed: 0 to 254")


def _map_file(file: Path) -> Tensor:
    with file.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # torch warns that writing would be undefined; a writable private mapping would count against commit limits.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.uint8)


def _view(shard: Tensor, entry: TensorEntry) -> Tensor:
    raw, dtype = shard[entry.begin : entry.end], TORCH_DTYPES[entry.dtype]
    if entry.begin % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(entry.shape)
