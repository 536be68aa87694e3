"""Maps the weights of a checkpoint into memory without copying them, after every check that the headers allow."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from perilune.checkpoint.check import check_index
from perilune.checkpoint.index import read_index
from perilune.checkpoint.mapped import MappedFile
from perilune.checkpoint.names import Part, TensorFamily, parameter_name
from perilune.checkpoint.safetensors import TensorEntry
from perilune.config.model import ModelConfig
from perilune.errors import CheckpointError


@dataclass(frozen=True)
class MappedTensors:
    """The tensors of a checkpoint: where and what they are by stored name, and themselves by parameter name."""

    entries: dict[str, TensorEntry]
    families: dict[str, TensorFamily]
    files: dict[Path, MappedFile]
    state: dict[str, Tensor]

    def file(self, name: str) -> MappedFile:
        """The file that holds a tensor."""
        return self.files[self.entries[name].file]


def load_state(directory: Path, config: ModelConfig, *, check_scales: bool = False) -> dict[str, Tensor]:
    """Maps every tensor: parameter name (see `parameter_name`) -> read-only tensor.

    Shapes and dtypes are those stored: `A_log` keeps its zero tail, experts stay packed. A missing indexer
    `k_norm.bias` comes as zeros. `check_scales` also reads every MXFP4 scale. Raises CheckpointError.
    """
    return map_tensors(directory, config, check_scales=check_scales).state


def map_tensors(
    directory: Path, config: ModelConfig, *, check_scales: bool, with_experts: bool = True
) -> MappedTensors:
    """What `load_state` gives, and where it came from; `with_experts` says whether the routed experts are among it."""
    index = read_index(directory)
    families = check_index(index, config)
    if not with_experts:
        families = {name: family for name, family in families.items() if family.part is not Part.EXPERTS}
    entries = {name: index.entries[name] for name in families}
    files = {file: MappedFile(file) for file in dict.fromkeys(entry.file for entry in entries.values())}
    stored = {name: files[entry.file].tensor(entry) for name, entry in entries.items()}
    check_values(stored, families, config, check_scales=check_scales)
    state = {parameter_name(name): tensor for name, tensor in stored.items()}
    if config.indexer is not None:
        for layer in config.full_attn_layers:
            prefix = f"model.layers.{layer}.self_attn.indexer.k_norm."
            if prefix + "bias" not in state:
                state[prefix + "bias"] = torch.zeros_like(state[prefix + "weight"])
    return MappedTensors(entries, families, files, state)


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
