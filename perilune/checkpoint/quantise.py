"""Online quantisation: loads a checkpoint with the projections of its layers in 8 bits."""

from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from perilune import ops
from perilune.checkpoint.loader import MappedText, map_text
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
    text = map_text(directory, config, check_scales=check_scales)
    state: dict[str, LinearWeight] = dict(text.state)
    names = [name for name, family in text.families.items() if family.is_projection]
    names.sort(key=lambda name: (text.entries[name].file, text.entries[name].begin))
    pages = LargePages(sum(_room(text.families[name], dtype) for name in names))
    total = sum(text.entries[name].num_bytes for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="8-bit weights", disable=None, leave=False) as bar:
        for name, following in pairwise([*names, None]):
            assert name is not None
            if following is not None:
                text.file(following).prefetch(text.entries[following])
            state[parameter_name(name)] = _quantised(text, name, dtype, pages)
            bar.update(text.entries[name].num_bytes)
    return state


def _room(family: TensorFamily, dtype: torch.dtype) -> int:
    outputs, columns = family.shape
    return LargePages.room(outputs * columns * dtype.itemsize) + LargePages.room(outputs * torch.float32.itemsize)


def _quantised(text: MappedText, name: str, dtype: torch.dtype, pages: LargePages) -> ChannelScaled:
    entry = text.entries[name]
    outputs, columns = entry.shape
    weight = ChannelScaled(pages.take(outputs, columns, dtype=dtype), pages.take(outputs, dtype=torch.float32))
    ops.quantize_rows(text.state[parameter_name(name)], weight)
    text.file(name).release(entry)
    return weight
