"""Exactness against converting the values with every scale."""

import pytest
import torch

from perilune.checkpoint.precision.exactness import FORMATS, bits_lost, extent_of_mxfp4, extent_of_values
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
