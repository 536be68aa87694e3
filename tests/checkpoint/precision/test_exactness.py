"""Exactness against converting the values with every scale."""

from dataclasses import astuple

import pytest
import torch

from perilune.checkpoint.precision.exactness import (
    FORMATS,
    bits_lost,
    extent_of_bfloat16,
    extent_of_mxfp4,
    extent_of_values,
)
from perilune.ops.mxfp4.reference import mxfp4_dequantize

DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}


def round_trips(values, target):
    """Whether some power of two, tried one after the other, lets every value come back as it was."""
    for k in range(-80, 81):
        scaled = values.double() * 2.0**-k
        if target == "int8":
            back = scaled.round().clamp(-127, 127)
        else:
            if not torch.equal(scaled.float().double(), scaled):
                continue
            back = scaled.float().to(DTYPES[target]).double()
        if torch.equal(back, scaled):
            return True
    return False


def regions(weight, region):
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128), "group": (1, 32)}[region]
    return [weight[i : i + height, j : j + width] for i in range(0, rows, height) for j in range(0, columns, width)]


@pytest.mark.parametrize("region", ["tensor", "channel", "block", "group"])
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("spread", [2, 3, 4, 13, 14, 15, 28, 29])
def test_mxfp4_is_called_lossless_exactly_where_some_scale_brings_every_value_back(spread, target, region):
    generator = torch.Generator().manual_seed(spread)
    packed = torch.randint(0, 256, (130, 80), dtype=torch.uint8, generator=generator)
    scale = torch.randint(120, 121 + spread, (130, 5), dtype=torch.uint8, generator=generator)
    packed[0, :16] = 0
    lost = bits_lost(extent_of_mxfp4(packed, scale).over(region), FORMATS[target]).flatten()
    parts = regions(mxfp4_dequantize(packed, scale), region)
    assert [bool(bits == 0) for bits in lost] == [round_trips(part, target) for part in parts]


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("bits", [1, 3, 4, 5, 7, 8])
def test_plain_values_are_called_lossless_exactly_where_some_scale_brings_every_value_back(bits, target):
    generator = torch.Generator().manual_seed(bits)
    odd = torch.randint(-(2**bits) + 1, 2**bits, (64, 40), generator=generator).double()
    weight = (odd * 2.0 ** torch.randint(0, 6, (64, 40), generator=generator)).bfloat16()
    weight[3] = 0
    lost = bits_lost(extent_of_values(weight).over("channel"), FORMATS[target])
    assert [bool(x == 0) for x in lost] == [round_trips(row, target) for row in weight]


@pytest.mark.parametrize(("target", "widest"), [("e4m3fn", 14), ("e4m3fnuz", 14), ("e5m2", 28), ("int8", 3)])
@pytest.mark.parametrize("ends", [(0, None), (None, 254)])
def test_a_row_with_every_code_is_exact_up_to_the_documented_spread_at_both_ends_of_the_range(target, widest, ends):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | codes.flip(0) << 4).repeat(1, 2)
    for spread, exact in ((widest, True), (widest + 1, False)):
        low = ends[0] if ends[0] is not None else 254 - spread
        scale = torch.tensor([[low, low + spread]], dtype=torch.uint8)
        assert bool(bits_lost(extent_of_mxfp4(packed, scale).over("channel"), FORMATS[target]) == 0) is exact


def test_tables_of_bfloat16_give_what_the_arithmetic_gives():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(1))]
    for weight in (finite[:, None], finite.view(-1, 510), shuffled.view(-1, 102), torch.zeros(3, 40).bfloat16()):
        for found, expected in zip(astuple(extent_of_bfloat16(weight)), astuple(extent_of_values(weight)), strict=True):
            assert torch.equal(found, expected)


def test_tables_of_codes_give_what_the_arithmetic_gives():
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(0, 256, (300, 64), dtype=torch.uint8, generator=generator)
    packed[:64] = torch.randint(0, 8, (64, 1), dtype=torch.uint8, generator=generator) * 17  # few codes in a group
    packed[:8] = 0
    scale = torch.randint(30, 200, (300, 4), dtype=torch.uint8, generator=generator)
    found, expected = extent_of_mxfp4(packed, scale), extent_of_values(mxfp4_dequantize(packed, scale))
    assert all(torch.equal(*pair) for pair in zip(astuple(found), astuple(expected), strict=True))
