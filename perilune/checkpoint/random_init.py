"""Random weights in the released layout: the same for the same seed, whatever the order, and far from degenerate.

Every linear keeps the scale of its input, so logits come out with a standard deviation near 1.
"""

import math
import zlib
from collections.abc import Iterator
from math import prod

import numpy as np
import torch
from torch import Tensor

from perilune.checkpoint.mapped import TORCH_DTYPES
from perilune.checkpoint.names import Part, TensorFamily, tensor_table
from perilune.config.model import ModelConfig

# Root mean square of the 16 E2M1 values, all equally likely.
_E2M1_RMS = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (released name, tensor of the released dtype) for every tensor of the layout, vision included."""
    for name, family in tensor_table(config).released():
        rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        if family.part is Part.EXPERTS:
            yield name, _packed(name, family, rng)
        else:
            yield name, _values(name, family, config, rng).to(TORCH_DTYPES[family.dtypes[0]])


def _packed(name: str, family: TensorFamily, rng: np.random.Generator) -> Tensor:
    rows, columns = family.shape
    if name.endswith(".weight_packed"):
        return torch.from_numpy(np.frombuffer(bytearray(rng.bytes(rows * columns)), np.uint8).reshape(rows, columns))
    # Between the two powers of two around the wanted scale, at random, so that the mean square is as wanted.
    scale = (columns * 32) ** -0.5 / _E2M1_RMS
    low = math.floor(math.log2(scale))
    share = (scale**2 / 4.0**low - 1) / 3
    return torch.from_numpy((127 + low + (rng.random((rows, columns)) < share)).astype(np.uint8))


def _values(name: str, family: TensorFamily, config: ModelConfig, rng: np.random.Generator) -> Tensor:
    shape, leaf = family.shape, name.split(".")[-1]
    if leaf == "A_log":
        values = np.zeros(shape, np.float32)
        values[: config.kda.num_heads] = rng.uniform(math.log(0.5), math.log(4.0), config.kda.num_heads)
        return torch.from_numpy(values)
    mean, std = _distribution(name, family)
    values = rng.standard_normal(prod(shape), np.float32)
    values *= std
    values += mean
    return torch.from_numpy(values.reshape(shape))


def _distribution(name: str, family: TensorFamily) -> tuple[float, float]:
    leaf = name.split(".")[-1]
    if leaf == "dt_bias":
        return -2.0, 0.5  # memories from a few tokens to a few hundred
    if leaf == "e_score_correction_bias":
        return 0.0, 0.01
    if leaf == "bias":
        return 0.0, 0.1
    if len(family.shape) == 1:
        return 1.0, 0.1  # norms
    if family.part is Part.EMBEDDING:
        return 0.0, 1.0
    if "pos_emb" in name:
        return 0.0, 0.1
    return 0.0, prod(family.shape[1:]) ** -0.5
