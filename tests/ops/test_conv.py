import math

import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout, largest_error
from perilune.ops.conv.cases import ConvCase, arguments
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def naive(x, weight, state, state_slots, cu_seqlens):
    """Token after token: a window of the last inputs, then z / (1 + exp(-z)). Also the windows that remain."""
    taps, out, left = weight.shape[1], [], []
    for n, slot in enumerate(state_slots.tolist()):
        zeros = torch.zeros(taps - 1, x.shape[1], dtype=torch.float64)
        window = list(zeros if state is None else state[slot].double())
        for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
            window.append(x[t].double())
            z = sum(weight[:, j].double() * window[-taps + j] for j in range(taps))
            out.append(z / (1 + torch.exp(-z)))
        left.append(torch.stack(window[1 - taps :]))
    return torch.stack(out), torch.stack(left).detach()


@cases("short_conv")
def test_outputs_and_windows_follow_the_formula(op_name, case):
    given = make_arguments(op_name, case)
    expected, windows = naive(*given)
    y, after = call(op_name, given)
    assert y.dtype is case.dtype
    assert_close(expected, y, case.tolerance)
    if case.has_state:
        assert torch.equal(after[2][given[3]].double(), windows)


@cases("short_conv")
def test_only_the_named_states_change(op_name, case):
    given = make_arguments(op_name, case)
    _, after = call(op_name, given)
    assert all(torch.equal(given[index], after[index]) for index in (0, 1, 3, 4))
    if case.has_state:
        others = [slot for slot in range(after[2].shape[0]) if slot not in given[3].tolist()]
        assert others
        assert after[2][others].isnan().all()


@pytest.mark.parametrize("split", [1, 2, 3, 20, 36])
def test_a_sequence_split_anywhere_equals_the_whole_through_its_state(split):
    x, weight, state, slots, ends = make_arguments("short_conv", case_named("short_conv", "one sequence"))
    whole, after = call("short_conv", (x, weight, state, slots, ends))
    pieces = [ops.short_conv(x[:split], weight, state, slots, torch.tensor([0, split]))]
    pieces.append(ops.short_conv(x[split:], weight, state, slots, torch.tensor([0, len(x) - split])))
    assert largest_error(whole, torch.cat(pieces)) <= 1e-6  # SiLU rounds by its place in a vector register
    assert torch.equal(after[2][slots], state[slots])


def test_the_last_tap_is_the_current_token():
    x = torch.tensor([[1.0], [10.0], [100.0]])
    y = ops.short_conv(x, torch.tensor([[0.0, 1.0]]), None, torch.tensor([0]), torch.tensor([0, 3]))
    assert y.flatten().tolist() == pytest.approx([value / (1 + math.exp(-value)) for value in (1.0, 10.0, 100.0)])


def test_gradients_are_those_of_the_formula():
    case = ConvCase(name="grad", layout=Layout((1, 6), (0, 0)), channels=16, has_state=False)
    given = arguments(case, torch.Generator().manual_seed(0))
    assert_gradients_agree(ops.short_conv, lambda *own: naive(*own)[0], given, [0, 1])
