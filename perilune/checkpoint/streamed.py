"""Loads a checkpoint whose routed experts stay in its files: the rest into memory, and where the experts lie."""

from pathlib import Path

import torch

from perilune.checkpoint.check import check_index
from perilune.checkpoint.index import read_index
from perilune.checkpoint.loader import map_tensors
from perilune.checkpoint.names import TEXT_PREFIX, parameter_name
from perilune.checkpoint.quantise import quantise
from perilune.checkpoint.resident import read_tensors
from perilune.config.model import ModelConfig
from perilune.errors import CheckpointError
from perilune.ops.linear import LinearWeight
from perilune.ops.moe import ExpertPlaces

_TENSORS = tuple(f"{weight}.weight_{leaf}" for weight in ("w1", "w3", "w2") for leaf in ("packed", "scale"))


def find_experts(directory: Path, config: ModelConfig) -> ExpertPlaces:
    """Where the experts lie, from the headers alone. Raises CheckpointError, also where they are stored unpacked."""
    index = read_index(directory)
    check_index(index, config)
    files: dict[str, int] = {}
    places: list[tuple[int, int, int]] = []
    layers = [layer for layer in range(config.num_hidden_layers) if not config.is_dense(layer)]
    for layer in layers:
        for expert in range(config.moe.num_experts):
            prefix = f"{TEXT_PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}."
            for tensor in _TENSORS:
                entry = index.entries.get(prefix + tensor)
                if entry is None:
                    raise CheckpointError(
                        f"{directory} stores expert {expert} of layer {layer} unpacked; experts are streamed in the "
                        "released packing (MXFP4) only: leave expert_cache_bytes and memory_budget out"
                    )
                file = files.setdefault(str(entry.file), len(files))
                places.append((file, entry.begin, entry.num_bytes))
    moe = config.moe
    return ExpertPlaces(
        tuple(files),
        torch.tensor(places, dtype=torch.int64).view(len(layers), moe.num_experts, len(_TENSORS), 3),
        inner=moe.moe_intermediate_size,
        latent=moe.routed_expert_hidden_size,
    )


def load_resident_state(directory: Path, config: ModelConfig, dtype: torch.dtype | None) -> dict[str, LinearWeight]:
    """Every tensor but the experts' in memory, by parameter name; projections in 8 bits of `dtype` where one is given.

    Raises CheckpointError.
    """
    mapped = map_tensors(directory, config, check_scales=False, with_experts=False)
    quantised = {} if dtype is None else quantise(mapped, dtype)
    state: dict[str, LinearWeight] = {**mapped.state, **quantised}
    kept = {name: entry for name, entry in mapped.entries.items() if parameter_name(name) not in quantised}
    state.update((parameter_name(name), tensor) for name, tensor in read_tensors(kept.values()).items())
    return state
