"""Which 8-bit formats hold a matrix without rounding, from the exponents of its values.

A value is m * 2^low with m odd, |value| in [2^top, 2^(top + 1)), and top - low + 1 significant bits. Under a scale of
2^k a format holds it if and only if its significant bits suffice, low - k is not below the format's lowest exponent
and |value| / 2^k is not above its largest number. A region that shares one scale is exact if and only if all its
values allow the same k. Scales are powers of two; +0 and -0 count as one number. Formats: OCP 8-bit Floating Point
Specification 1.0 (e4m3fn, e5m2), and the FNUZ variant of one more in the bias (gfx942).
"""

from dataclasses import astuple, dataclass
from functools import cache

import torch
from torch import Tensor

from perilune.ops.mxfp4.reference import E2M1_VALUES, GROUP_SIZE

BLOCK_SIZE = 128
_GROUPS_PER_BLOCK = BLOCK_SIZE // GROUP_SIZE
# Of values that are all zero: they allow any scale.
_NONE = 1 << 12
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Format:
    """`bits` significant ones; the largest number is `largest` * 2^`top`, the least above zero 2^`low`."""

    bits: int
    top: int
    largest: float
    low: int


FORMATS = {
    "e4m3fn": Format(bits=4, top=8, largest=1.75, low=-9),
    "e4m3fnuz": Format(bits=4, top=7, largest=1.875, low=-10),
    "e5m2": Format(bits=3, top=15, largest=1.75, low=-16),
    "int8": Format(bits=7, top=6, largest=127 / 64, low=0),
}
REGIONS = ("tensor", "channel", "block", "group")


@dataclass(frozen=True)
class Extent:
    """Of each group of 32 columns: top exponent, largest / 2^top, low exponent, most significant bits; [O, I/32]."""

    top: Tensor
    largest: Tensor
    low: Tensor
    bits: Tensor

    def over(self, region: str) -> "Extent":
        """The same of whole regions: tensor, channel (row), block of 128 x 128, or group of 32 columns."""
        if region == "group":
            return self
        keys = self.top.double() + self.largest.double() / 2  # orders by top, then by what lies above it
        parts = [_gather(values, region, fill) for values, fill in ((keys, -_NONE), (self.low, _NONE), (self.bits, 0))]
        key, low, bits = parts[0].amax(-1), parts[1].amin(-1), parts[2].amax(-1)
        top = key.floor()
        return Extent(top.int(), ((key - top) * 2).float(), low, bits)


def extent_of_values(weight: Tensor) -> Extent:
    """The extent of weight [O, I] in float32 or bfloat16, whose values are finite."""
    columns = torch.nn.functional.pad(weight.double(), (0, -weight.shape[1] % GROUP_SIZE))
    mantissa, exponent = torch.frexp(columns.abs())
    whole = (mantissa * 2**24).long()  # at most 24 significant bits
    lowest = torch.frexp((whole & -whole).double())[1] - 1
    is_zero = whole == 0
    top = (exponent - 1).masked_fill(is_zero, -_NONE)
    low = (exponent + lowest - 24).masked_fill(is_zero, _NONE)
    bits = (24 - lowest).masked_fill(is_zero, 0)
    return _reduce(top, 2 * mantissa, low, bits)


def extent_of_bfloat16(weight: Tensor) -> Extent:
    """`extent_of_values` of a bfloat16 weight, by one table look-up per value instead of its arithmetic."""
    patterns = torch.nn.functional.pad(weight.view(torch.int16) & 0x7FFF, (0, -weight.shape[1] % GROUP_SIZE))
    table, groups = _bfloat16_table(), patterns.unflatten(-1, (-1, GROUP_SIZE))
    # the order of magnitudes is that of their patterns
    highest = groups.amax(-1).flatten().int()
    shape, each = groups.shape[:-1], groups.flatten().int()
    low = table.low.index_select(0, each).view(groups.shape).amin(-1)
    bits = table.bits.index_select(0, each).view(groups.shape).amax(-1)
    top = table.top.index_select(0, highest).view(shape)
    return Extent(top, table.largest.index_select(0, highest).view(shape), low.int(), bits.int())


def extent_of_mxfp4(packed: Tensor, scale: Tensor) -> Extent:
    """The extent of an MXFP4 weight: packed u8 [O, I/2], scale u8 [O, I/32] without 255."""
    # a byte becomes the set of its two magnitudes, and the 16 sets of a group one
    sets = torch.frombuffer(bytearray(packed.contiguous().numpy()).translate(_SETS), dtype=torch.int64).view(-1, 2)
    found = sets[:, 0] | sets[:, 1]
    for shift in (32, 16, 8):
        found = found | found >> shift
    index, table = (found & 0xFF).int(), _set_table()
    unit = Extent(*(leaf.index_select(0, index).view(scale.shape) for leaf in astuple(table)))
    shift, is_zero = scale.int() - _E8M0_BIAS, unit.bits == 0
    return Extent(
        torch.where(is_zero, unit.top, unit.top + shift),
        unit.largest,
        torch.where(is_zero, unit.low, unit.low + shift),
        unit.bits,
    )


# Byte of two E2M1 codes -> the set of their magnitudes, one bit for each of eight.
_SETS = bytes(1 << (byte & 7) | 1 << (byte >> 4 & 7) for byte in range(256))


@cache
def _set_table() -> Extent:
    """Of every set of E2M1 magnitudes, [256] each."""
    has = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return _flat(extent_of_values(has * torch.tensor(E2M1_VALUES[:8])))


@cache
def _bfloat16_table() -> Extent:
    """Of every bfloat16 magnitude by its pattern, [32768] each; those that are not finite hold nothing of use."""
    extent = _flat(
        extent_of_values(torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)[:, None].nan_to_num())
    )
    return Extent(extent.top, extent.largest, extent.low.short(), extent.bits.short())


def _flat(extent: Extent) -> Extent:
    return Extent(*(leaf.flatten() for leaf in astuple(extent)))


def bits_lost(extent: Extent, target: Format) -> Tensor:
    """Low bits that go in the worst value of each region, at the least scale under which none overflows; 0 is exact."""
    least = extent.top - target.top + (extent.largest > target.largest).int()
    most = extent.low - target.low
    lost = torch.maximum(least - most, extent.bits - target.bits)
    return torch.where(extent.bits == 0, 0, lost.clamp(min=0))


def _reduce(top: Tensor, largest: Tensor, low: Tensor, bits: Tensor) -> Extent:
    def grouped(values: Tensor) -> Tensor:
        return values.unflatten(-1, (-1, GROUP_SIZE))

    highest = grouped(top).amax(-1)
    at_top = grouped(largest).masked_fill(grouped(top) != highest[..., None], 0.0)
    return Extent(highest, at_top.amax(-1).float(), grouped(low).amin(-1), grouped(bits).amax(-1))


def _gather(values: Tensor, region: str, fill: int) -> Tensor:
    """Groups [O, I/32] -> regions [..., groups of a region]."""
    if region == "tensor":
        return values.flatten()
    if region == "channel":
        return values
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % _GROUPS_PER_BLOCK, 0, -rows % BLOCK_SIZE), value=fill)
    blocks = padded.unflatten(1, (-1, _GROUPS_PER_BLOCK)).unflatten(0, (-1, BLOCK_SIZE))
    return blocks.transpose(1, 2).flatten(2)
