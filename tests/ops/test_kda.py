import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout, largest_error
from perilune.ops.kda.cases import AttentionCase, attention_arguments
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def naive_decay(z, a_log, dt_bias, lower_bound):
    out = []
    for head in range(z.shape[1]):
        slope = torch.exp(a_log[head].double())
        out.append(lower_bound / (1 + torch.exp(-slope * (z[:, head].double() + dt_bias[head].double()))))
    return torch.stack(out, dim=1)


def l2_normalised(x, l2_eps, dtype):
    normed = x.double() / torch.sqrt((x.double() ** 2).sum() + l2_eps)
    return normed if dtype is torch.float32 else normed.to(dtype).double()  # the kernel's input is rounded


def naive_outputs(*arguments):
    return naive_attention(*arguments)[0]


def naive_attention(q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens):
    """One sequence, head and token after another: S_t = (I - beta k k^T) diag(alpha) S + beta k v^T; o = S^T q."""
    num_tokens, num_heads, width = q.shape
    outputs = [[None] * num_heads for _ in range(num_tokens)]
    final = torch.zeros(len(state_slots), num_heads, width, width, dtype=torch.float64)
    for n, slot in enumerate(state_slots.tolist()):
        for head in range(num_heads):
            s = torch.zeros(width, width, dtype=torch.float64) if state is None else state[slot, head].double()
            for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
                q_t, k_t = (l2_normalised(x[t, head], l2_eps, q.dtype) for x in (q, k))
                alpha, b = torch.exp(g[t, head].double()), beta[t, head].double()
                erase = torch.eye(width, dtype=torch.float64) - b * torch.outer(k_t, k_t)
                s = erase @ (alpha[:, None] * s) + b * torch.outer(k_t, v[t, head].double())
                outputs[t][head] = s.T @ q_t / width**0.5
            final[n, head] = s.detach()
    return torch.stack([torch.stack(row) for row in outputs]), final


@cases("kda_decay")
def test_decay_is_the_bound_times_a_sigmoid(op_name, case):
    z, a_log, dt_bias, lower_bound = make_arguments(op_name, case)
    g = ops.kda_decay(z, a_log, dt_bias, lower_bound)
    assert g.dtype is torch.float32
    assert_close(naive_decay(z, a_log, dt_bias, lower_bound), g, case.tolerance)
    assert ((g >= lower_bound) & (g <= 0)).all()


@cases("kda_recurrent", "kda_chunk")
def test_outputs_and_final_states_follow_the_recurrence(op_name, case):
    arguments = make_arguments(op_name, case)
    expected, final = naive_attention(*arguments)
    o, after = call(op_name, arguments)
    assert o.dtype is case.dtype
    assert_close(expected, o, case.tolerance)
    if case.has_state:
        assert_close(final, after[6][arguments[7]], case.tolerance)


@pytest.mark.parametrize("op_name", ["kda_recurrent", "kda_chunk"])
@pytest.mark.parametrize("split", [1, 15, 16, 17, 36])
def test_a_sequence_split_anywhere_equals_the_whole_through_its_state(op_name, split):
    case = case_named(op_name, "one sequence")
    q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens = make_arguments(op_name, case)
    whole, after = call(op_name, (q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens))
    pieces = []
    for part in (slice(0, split), slice(split, None)):
        own = [x[part] for x in (q, k, v, g, beta)]
        ends = torch.tensor([0, own[0].shape[0]])
        pieces.append(getattr(ops, op_name)(*own, l2_eps, state, state_slots, ends))
    assert largest_error(whole, torch.cat(pieces)) <= case.tolerance.relative
    assert largest_error(after[6], state) <= case.tolerance.relative


def test_chunks_and_single_tokens_take_turns_on_one_state():
    case = case_named("kda_chunk", "one sequence")
    q, k, v, g, beta, l2_eps, state, slots, cu_seqlens = make_arguments("kda_chunk", case)
    whole, after = call("kda_recurrent", (q, k, v, g, beta, l2_eps, state, slots, cu_seqlens))
    pieces = []
    for op, first, last in [(ops.kda_chunk, 0, 20), (ops.kda_recurrent, 20, 21), (ops.kda_chunk, 21, 37)]:
        own = [x[first:last] for x in (q, k, v, g, beta)]
        pieces.append(op(*own, l2_eps, state, slots, torch.tensor([0, last - first])))
    assert largest_error(whole, torch.cat(pieces)) <= case.tolerance.relative
    assert largest_error(after[6], state) <= case.tolerance.relative


@cases("kda_recurrent", "kda_chunk")
def test_only_the_named_states_change(op_name, case):
    arguments = make_arguments(op_name, case)
    _, after = call(op_name, arguments)
    for index, (before, left) in enumerate(zip(arguments, after, strict=True)):
        if index != 6:
            assert not isinstance(before, torch.Tensor) or torch.equal(before, left), f"argument {index} was changed"
    if case.has_state:
        others = [slot for slot in range(after[6].shape[0]) if slot not in arguments[7].tolist()]
        assert others
        assert after[6][others].isnan().all()
        assert not torch.equal(after[6][arguments[7]], arguments[6][arguments[7]])


@pytest.mark.parametrize("op_name", ["kda_recurrent", "kda_chunk"])
@pytest.mark.parametrize("token", [0, 7, 18, 36])
def test_a_later_token_changes_no_earlier_output(op_name, token):
    arguments = make_arguments(op_name, case_named(op_name, "one sequence"))
    changed = [x.clone() for x in arguments[:5]]
    for x in changed:
        x[token] = x[token] * 0.5 - 0.1
    before, _ = call(op_name, arguments)
    after, _ = call(op_name, (*changed, *arguments[5:]))
    # a chunk's triangular solve may round its earlier rows otherwise, but not by more than rounding
    assert largest_error(before[:token], after[:token]) <= (1e-6 if token else 0)
    assert not torch.allclose(before[token], after[token])


@pytest.mark.parametrize("op_name", ["kda_recurrent", "kda_chunk"])
def test_a_neighbour_changes_nothing(op_name):
    case = case_named(op_name, "lengths differ")
    q, k, v, g, beta, l2_eps, state, slots, cu_seqlens = make_arguments(op_name, case)
    together, after = call(op_name, (q, k, v, g, beta, l2_eps, state, slots, cu_seqlens))
    for n, slot in enumerate(slots):
        own = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        ends = torch.tensor([0, own.stop - own.start])
        alone, left = call(op_name, (*(x[own] for x in (q, k, v, g, beta)), l2_eps, state, slots[n : n + 1], ends))
        assert largest_error(alone, together[own]) <= case.tolerance.relative
        assert largest_error(left[6][slot], after[6][slot]) <= case.tolerance.relative


def test_normalised_keys_are_rounded_to_the_activations_dtype_and_states_are_not():
    k = torch.tensor([[[1.0] * 3 + [0.0] * 13]], dtype=torch.bfloat16)
    v, g, beta, state = torch.full_like(k, 1.25), torch.zeros(1, 1, 16), torch.ones(1, 1), torch.zeros(1, 1, 16, 16)
    for op in (ops.kda_recurrent, ops.kda_chunk):
        op(k, k, v, g, beta, 1e-6, state.zero_(), torch.tensor([0]), torch.tensor([0, 1]))
        assert state[0, 0, 0, 0] == 0.578125 * 1.25  # 3^-0.5 is 0.57735


def test_no_beta_and_no_decay_leave_the_state_alone():
    case = AttentionCase(name="idle", layout=Layout((19,), (4,)), heads=2, width=16, decay=(0.0, 0.0), beta=(0.0, 0.0))
    arguments = attention_arguments(case, torch.Generator().manual_seed(0))
    for op_name in ("kda_recurrent", "kda_chunk"):
        _, after = call(op_name, arguments)
        assert torch.equal(after[6].nan_to_num(), arguments[6].nan_to_num())


@pytest.mark.parametrize("op_name", ["kda_recurrent", "kda_chunk"])
@pytest.mark.parametrize("decay", [(-2.0, 0.0), (-5.0, -4.9)])
def test_gradients_are_those_of_the_recurrence(op_name, decay):
    layout = Layout((3, 18), (0, 0))
    case = AttentionCase(name="grad", layout=layout, heads=2, width=16, decay=decay, beta=(0.1, 0.9), has_state=False)
    q, k, v, *rest = attention_arguments(case, torch.Generator().manual_seed(0))
    q[0, 0], k[0, 0] = 1.0, -1.0  # at zero the L2 norm bends with a radius of its eps
    assert_gradients_agree(getattr(ops, op_name), naive_outputs, (q, k, v, *rest), [0, 1, 2, 3, 4], 2e-4)


def test_gradients_of_the_decay_are_those_of_the_formula():
    arguments = make_arguments("kda_decay", case_named("kda_decay", "two heads of K3"))
    assert_gradients_agree(ops.kda_decay, naive_decay, arguments, [0, 1, 2])
