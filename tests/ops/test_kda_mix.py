import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout, largest_error
from perilune.ops.kda.cases import MixCase, mix_arguments
from perilune.ops.kda.reference import mix_of
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments
from tests.ops.test_conv import naive as naive_conv
from tests.ops.test_kda import naive_attention, naive_decay
from tests.ops.test_norm import naive_gated_rms

STATE, CONV_STATE, SLOTS, ENDS = 15, 16, 17, 18


def naive_mix(*given):
    """In float64, rounded to the activations' dtype where an op ends. Also the states that remain."""
    q, k, v, z, beta, gate, *convs, a_log, dt_bias, o_norm, bound, l2_eps, norm_eps, state, conv_state, slots, ends = (
        given
    )
    heads, width = beta.shape[1], len(o_norm)
    rounded = (lambda x: x) if q.dtype is torch.float32 else (lambda x: x.to(q.dtype))
    windows, streams = [], []
    own_states = (None,) * 3 if conv_state is None else conv_state.chunk(3, dim=-1)
    for x, weight, own in zip((q, k, v), convs, own_states, strict=True):
        y, window = naive_conv(x, weight[:, 0], own, slots, ends)
        streams.append(rounded(y).unflatten(-1, (heads, width)))
        windows.append(window)
    g = naive_decay(z.unflatten(-1, (heads, width)), a_log, dt_bias.view(heads, width), bound)
    o, final = naive_attention(*streams, g, torch.sigmoid(beta.double()), l2_eps, state, slots, ends)
    y = naive_gated_rms(rounded(o), o_norm, gate.unflatten(-1, (heads, width)), norm_eps)
    return y.flatten(1), final, torch.cat(windows, dim=-1)


@cases("kda_mix")
def test_a_layer_between_its_projections_follows_the_formulas(op_name, case):
    given = make_arguments(op_name, case)
    expected, final, windows = naive_mix(*given)
    o, after = call(op_name, given)
    assert o.dtype is case.dtype
    assert_close(expected, o, case.tolerance)
    if case.has_state:
        assert_close(final, after[STATE][given[SLOTS]], case.tolerance)
        assert torch.equal(after[CONV_STATE][given[SLOTS]].double(), windows)


@cases("kda_mix")
def test_only_the_named_states_change(op_name, case):
    given = make_arguments(op_name, case)
    _, after = call(op_name, given)
    for index, (before, left) in enumerate(zip(given, after, strict=True)):
        if index in (STATE, CONV_STATE) and before is not None:
            others = [slot for slot in range(len(left)) if slot not in given[SLOTS].tolist()]
            assert others
            assert left[others].isnan().all()
        elif isinstance(before, torch.Tensor):
            assert torch.equal(before.nan_to_num(), left.nan_to_num()), f"argument {index} was changed"


@pytest.mark.parametrize("split", [1, 2, 16, 20, 36])
def test_a_sequence_split_anywhere_equals_the_whole_through_its_states(split):
    case = case_named("kda_mix", "one sequence")
    given = make_arguments("kda_mix", case)
    whole, after = call("kda_mix", given)
    pieces = []
    for part in (slice(0, split), slice(split, None)):
        own = [x[part] for x in given[:6]]
        pieces.append(ops.kda_mix(*own, *given[6:ENDS], torch.tensor([0, len(own[0])])))
    assert largest_error(whole, torch.cat(pieces)) <= case.tolerance.relative
    assert largest_error(after[STATE], given[STATE]) <= case.tolerance.relative
    assert torch.equal(after[CONV_STATE].nan_to_num(), given[CONV_STATE].nan_to_num())


def test_single_tokens_take_the_recurrence_and_longer_runs_the_chunks():
    taken = []

    def noted(name):
        op = getattr(ops, name).reference
        return lambda q, *rest: taken.append((name, len(q), rest[-1].tolist())) or op(q, *rest)

    parts = [getattr(ops, name).reference for name in ("short_conv", "kda_decay", "gated_rms_norm")]
    mix = mix_of(*parts[:2], noted("kda_recurrent"), noted("kda_chunk"), parts[2])
    case = MixCase(name="runs", layout=Layout((1, 1, 5, 3, 1), (2, 0, 4, 9, 3)), heads=2, width=16)
    mix(*mix_arguments(case, torch.Generator().manual_seed(0)))
    assert taken == [("kda_recurrent", 2, [0, 1, 2]), ("kda_chunk", 8, [0, 5, 8]), ("kda_recurrent", 1, [0, 1])]


def test_gradients_are_those_of_the_formulas():
    case = MixCase(name="grad", layout=Layout((3, 18), (0, 0)), heads=2, width=16, has_state=False)
    given = mix_arguments(case, torch.Generator().manual_seed(0))
    assert_gradients_agree(ops.kda_mix, lambda *own: naive_mix(*own)[0], given, [*range(9), 10, 11], 2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_another_layout_and_dtype_are_used_in_place(dtype):
    """Seats inside a larger tensor, and a convolution state in the other dtype than the activations."""
    case = case_named("kda_mix", "lengths differ")
    given = list(make_arguments("kda_mix", case))
    given[CONV_STATE] = given[CONV_STATE].to(dtype)
    expected, after = call("kda_mix", tuple(given))
    wide = torch.stack((given[STATE], torch.zeros_like(given[STATE])), dim=1)
    given[STATE] = wide[:, 0]
    o = ops.kda_mix(*given)
    assert largest_error(expected, o) <= case.tolerance.relative
    assert largest_error(after[STATE], wide[:, 0]) <= case.tolerance.relative
    assert largest_error(after[CONV_STATE], given[CONV_STATE]) <= case.tolerance.relative
    assert not wide[:, 1].any()
