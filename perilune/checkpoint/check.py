"""Compares the headers of a checkpoint with the table of names. No torch, no weights."""

import logging
from collections.abc import Mapping

from perilune.checkpoint.index import CheckpointIndex
from perilune.checkpoint.names import TEXT_PREFIX, TensorFamily, TensorTable, layer_of, tensor_table
from perilune.checkpoint.safetensors import TensorEntry
from perilune.config.model import ModelConfig
from perilune.errors import CheckpointError

logger = logging.getLogger(__name__)


def check_index(index: CheckpointIndex, config: ModelConfig) -> dict[str, TensorFamily]:
    """Returns the family of every tensor to be used; raises CheckpointError for the first that is not as released.

    Layers from `num_hidden_layers` on are left out with a warning.
    """
    table, entries = tensor_table(config), index.entries
    _check_layer_kinds(entries, config)
    families: dict[str, TensorFamily] = {}
    ignored: set[int] = set()
    for name, entry in entries.items():
        layer = layer_of(name)
        if layer is not None and layer >= config.num_hidden_layers:
            ignored.add(layer)
            continue
        families[name] = _check_entry(entry, table)
    if ignored:
        logger.warning(
            "layers %s are not used: the configuration has num_hidden_layers %d",
            ", ".join(map(str, sorted(ignored))),
            config.num_hidden_layers,
        )
    _check_missing(index, table)
    return families


def _check_entry(entry: TensorEntry, table: TensorTable) -> TensorFamily:
    family = table.find(entry.name)
    if family is None:
        raise CheckpointError(
            f"{entry.file}: unexpected tensor {entry.name}; the released layout with this config.json has no such name"
        )
    if entry.shape != family.shape:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has shape {list(entry.shape)}; this config.json allows {list(family.shape)}"
        )
    if entry.dtype not in family.dtypes:
        raise CheckpointError(
            f"{entry.file}: {entry.name} has dtype {entry.dtype}; allowed: {' or '.join(family.dtypes)}"
        )
    return family


def _check_layer_kinds(entries: Mapping[str, TensorEntry], config: ModelConfig) -> None:
    """Presence of `A_log` or `q_a_proj` says what a layer is; the configuration must say the same."""
    for layer in range(config.num_hidden_layers):
        prefix = f"{TEXT_PREFIX}model.layers.{layer}.self_attn."
        for leaf, is_kda in (("A_log", True), ("q_a_proj.weight", False)):
            entry = entries.get(prefix + leaf)
            if entry is not None and config.is_kda(layer) != is_kda:
                found, said = ("KDA", "full_attn_layers") if is_kda else ("full attention", "kda_layers")
                raise CheckpointError(
                    f"{entry.file}: {entry.name} makes layer {layer} a {found} layer, "
                    f"but config.json lists it (as {layer + 1}) in {said}"
                )


def _check_missing(index: CheckpointIndex, table: TensorTable) -> None:
    entries = index.entries
    for name, family in table.released():
        if name in entries:
            unpacked = name.removesuffix("_packed")
            if unpacked != name and unpacked in entries:
                raise CheckpointError(
                    f"{entries[name].file}: both {name} and {unpacked} are stored; allowed: one of the two"
                )
        elif family.is_required and not _is_stored_unpacked(name, entries):
            raise CheckpointError(
                f"{index.directory}: tensor {name} is missing from the shards; this config.json requires it"
            )


def _is_stored_unpacked(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    base, dot, leaf = name.rpartition(".")
    return leaf in ("weight_packed", "weight_scale") and f"{base}{dot}weight" in entries
