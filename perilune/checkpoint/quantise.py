"""Online quantisation: loads a checkpoint with the projections of its layers in 8 bits."""

from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from perilune import ops
from perilune.checkpoint.loader import MappedTensors, map_tensors
from perilune.checkpoint.mapped import LargePages
from perilune.checkpoint.names import TensorFamily, parameter_name
from perilune.config.model import ModelConfig
from perilune.ops.linear import ChannelScaled, LinearWeight


def load_quantised_state(
    directory: Path, config: ModelConfig, dtype: torch.dtype, *, check_scales: bool = False
) -> dict[str, LinearWeight]:
    """As `load_state`, with every projection (`TensorFamily.is_projection`) in `dtype` and a scale per output.

    A projection's mapped pages are given back once it is quantised, so that memory holds the result and no more than
    two tensors of the file. Shows its progress on a terminal.
    """
    mapped = map_tensors(directory, config, check_scales=check_scales)
    return {**mapped.state, **quantise(mapped, dtype)}


def quantise(mapped: MappedTensors, dtype: torch.dtype) -> dict[str, ChannelScaled]:
    """The projections of mapped tensors in `dtype`, by parameter name; their mapped pages are given back."""
    state: dict[str, ChannelScaled] = {}
    names = [name for name, family in mapped.families.items() if family.is_projection]
    names.sort(key=lambda name: (mapped.entries[name].file, mapped.entries[name].begin))
    pages = LargePages(sum(_room(mapped.families[name], dtype) for name in names))
    total = sum(mapped.entries[name].num_bytes for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="8-bit weights", disable=None, leave=False) as bar:
        for name, following in pairwise([*names, None]):
            assert name is not None
            if following is not None:
                mapped.file(following).prefetch(mapped.entries[following])
            state[parameter_name(name)] = _quantised(mapped, name, dtype, pages)
            bar.update(mapped.entries[name].num_bytes)
    return state


def _room(family: TensorFamily, dtype: torch.dtype) -> int:
    outputs, columns = family.shape
    return LargePages.room(outputs * columns * dtype.itemsize) + LargePages.room(outputs * torch.float32.itemsize)


def _quantised(mapped: MappedTensors, name: str, dtype: torch.dtype, pages: LargePages) -> ChannelScaled:
    entry = mapped.entries[name]
    outputs, columns = entry.shape
    weight = ChannelScaled(pages.take(outputs, columns, dtype=dtype), pages.take(outputs, dtype=torch.float32))
    ops.quantize_rows(mapped.state[parameter_name(name)], weight)
    mapped.file(name).release(entry)
    return weight
