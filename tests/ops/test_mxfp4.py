import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune import ops
from perilune.ops.mxfp4.reference import mxfp4_dequantize, mxfp4_quantize, mxfp4_round
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def naive_dequantize(packed, scale):
    rows = []
    for codes, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        row = []
        for byte in codes:
            for code in (byte % 16, byte // 16):
                sign = -1.0 if code >= 8 else 1.0
                row.append(sign * MAGNITUDES[code % 8] * 2.0 ** (scales[len(row) // 32] - 127))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def packed_row(*codes_then_zeros):
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, : len(codes_then_zeros)] = torch.tensor(codes_then_zeros)
    return packed


@pytest.mark.parametrize(("byte", "scale", "values"), [(0x21, 127, [0.5, 1.0]), (0xF9, 126, [-0.25, -3.0])])
def test_bytes_mean_what_the_format_says(byte, scale, values):
    decoded = mxfp4_dequantize(packed_row(byte), torch.tensor([[scale]], dtype=torch.uint8))
    assert decoded[0, :2].tolist() == values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_times_every_scale_in_range_is_exact(dtype):
    packed = (torch.arange(16) * 16 + torch.arange(15, -1, -1)).to(torch.uint8).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8)[:, None]  # 6 * 2^(253 - 127) is past float32's largest number
    assert torch.equal(mxfp4_dequantize(packed, scale, dtype).double(), naive_dequantize(packed, scale))


@cases("mxfp4_linear")
def test_the_product_is_that_with_the_decoded_weight(op_name, case):
    x, packed, scale = make_arguments(op_name, case)
    y, _ = call(op_name, (x, packed, scale))
    assert y.dtype is case.dtype
    assert torch.isfinite(y).all()
    assert_close(x.double() @ naive_dequantize(packed, scale).T, y, case.tolerance)


@cases("mxfp4_linear")
def test_decoding_then_encoding_gives_the_same_weight(op_name, case):
    _, packed, scale = make_arguments(op_name, case)
    weight = mxfp4_dequantize(packed, scale)
    assert torch.equal(mxfp4_dequantize(*mxfp4_quantize(weight)), weight)


GROUPS = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=32, max_size=32)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_encoding_takes_the_nearest_value_of_its_scale_and_is_idempotent(values):
    weight = torch.tensor([values])
    packed, scale = mxfp4_quantize(weight)
    rounded = mxfp4_dequantize(packed, scale)
    unit = 2.0 ** (int(scale) - 127)
    choices = unit * torch.tensor([-m for m in MAGNITUDES] + MAGNITUDES, dtype=torch.float64)
    nearest = (weight.double()[0, :, None] - choices).abs().min(-1).values
    assert torch.equal((rounded.double() - weight.double())[0].abs(), nearest)
    assert torch.equal(mxfp4_dequantize(*mxfp4_quantize(rounded)), rounded)
    assert torch.equal(mxfp4_round(weight), rounded)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
@example([7.0, 3.0, 0.3] + [0.0] * 29)
@example([6.9, 3.0, 0.3] + [0.0] * 29)
def test_the_scale_is_the_smallest_under_which_the_maximum_does_not_saturate(values):
    weight = torch.tensor([values])
    largest = float(weight.abs().max())
    scale = int(mxfp4_quantize(weight)[1])
    if largest > 0:
        unit = 2.0 ** (scale - 127)
        assert largest < 7 * unit
        assert scale == 0 or largest >= 7 * unit / 2


def test_extremes_are_encoded():
    tiny = torch.zeros(1, 32)
    assert not mxfp4_dequantize(*mxfp4_quantize(tiny)).any()
    tiny[0, 3] = -(2.0**-128)
    assert torch.equal(mxfp4_dequantize(*mxfp4_quantize(tiny)), tiny)
    huge = torch.full((1, 32), 1.5 * 2.0**127)
    assert torch.equal(mxfp4_dequantize(*mxfp4_quantize(huge)), huge)


def test_leading_dimensions_stay():
    weight = torch.randn(3, 5, 64)
    packed, scale = mxfp4_quantize(weight)
    assert (packed.shape, scale.shape) == ((3, 5, 32), (3, 5, 2))
    assert torch.equal(mxfp4_dequantize(packed, scale)[1], mxfp4_dequantize(*mxfp4_quantize(weight[1])))


def test_the_gradient_passes_straight_through_rounding():
    weight = torch.randn(4, 64, requires_grad=True)
    direction = torch.randn(4, 64)
    (gradient,) = torch.autograd.grad((mxfp4_round(weight) * direction).sum(), weight)
    assert torch.equal(gradient, direction)


def test_the_gradient_of_the_input_is_that_of_the_formula():
    arguments = make_arguments("mxfp4_linear", case_named("mxfp4_linear", "few rows"))
    assert_gradients_agree(ops.mxfp4_linear, lambda x, *own: x @ naive_dequantize(*own).T, arguments, [0])
