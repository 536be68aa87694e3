"""Tokens that may be taken back, against states kept for every position by plain steps of one token."""

import pytest
import torch

from perilune import ops
from perilune.ops import _native
from perilune.ops.case import LAYOUTS, Layout, copied, largest_error
from perilune.ops.kda import KdaRecords
from perilune.ops.kda.cases import MixCase, verify_arguments
from tests.ops.calls import call, cases, make_arguments

STATE, CONV_STATE, SLOTS, ENDS, RECORDS = 15, 16, 17, 18, 19
DRAFTED = Layout((8, 1, 3, 8), (40, 0, 7, 1))
SIZES = [
    MixCase(name="small heads", layout=DRAFTED, heads=3, width=16),
    MixCase(name="six taps", layout=DRAFTED, heads=2, width=32, taps=6),
    MixCase(name="heads of K3", layout=DRAFTED, heads=2, width=128),
]
SIZES += [case.in_bfloat16() for case in SIZES]
BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.skipif(_native.absence() is not None, reason="none"))]


@pytest.fixture(params=BACKENDS)
def backend(request):
    names = ("kda_mix", "kda_verify", "kda_commit")
    for name in names:
        getattr(ops, name).force(request.param)
    yield request.param
    for name in names:
        getattr(ops, name).force(None)


def arguments(case, seed=0):
    return verify_arguments(case, torch.Generator().manual_seed(seed))


def plain_steps(given):
    """One token after the other: o of all tokens, and the states of every sequence before and after each of them."""
    own = copied(given)
    o = torch.zeros_like(own[0])
    states = []
    for n, slot in enumerate(own[SLOTS].tolist()):
        kept = [(own[STATE][slot].clone(), own[CONV_STATE][slot].clone())]
        for t in range(int(own[ENDS][n]), int(own[ENDS][n + 1])):
            token = [x[t : t + 1] for x in own[:6]]
            place = (own[STATE], own[CONV_STATE], own[SLOTS][n : n + 1], torch.tensor([0, 1]))
            o[t] = ops.kda_mix(*token, *own[6:STATE], *place)
            kept.append((own[STATE][slot].clone(), own[CONV_STATE][slot].clone()))
        states.append(kept)
    return o, states


def commit(given, counts):
    """The states [slots, ...] after a commit of one layer."""
    states = [given[STATE][None].clone(), given[CONV_STATE][None].clone()]
    records = KdaRecords(*(record[None] for record in given[RECORDS]))
    ops.kda_commit(*states, records, given[SLOTS], given[ENDS], torch.tensor(counts))
    return states[0][0], states[1][0]


@cases("kda_verify")
def test_a_pass_gives_what_plain_steps_give_and_leaves_the_states(op_name, case):
    given = make_arguments(op_name, case)
    o, after = call(op_name, given)
    expected, _ = plain_steps(given)
    assert largest_error(expected, o) <= case.tolerance.relative
    for index in (STATE, CONV_STATE):
        assert torch.equal(given[index].nan_to_num(), after[index].nan_to_num())
    assert all(not record[-2:].any() for record in after[RECORDS])


@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_results_and_committed_states_are_those_of_plain_steps(case, backend):
    """By the native core to the bit; torch sums a batch of sequences in another order than one alone."""
    given = arguments(case)
    limit = 0.0 if backend == "native" else case.tolerance.relative
    expected, states = plain_steps(given)
    assert largest_error(expected, ops.kda_verify(*given)) <= limit
    for counts in ((0, 0, 0, 0), (3, 1, 0, 8), (8, 1, 3, 1), (1, 0, 2, 5), (8, 1, 3, 8)):
        found = commit(given, counts)
        for n, (slot, count) in enumerate(zip(given[SLOTS].tolist(), counts, strict=True)):
            for state, right in zip(found, states[n][count], strict=True):
                assert largest_error(right, state[slot]) <= limit
        others = [slot for slot in range(len(found[0])) if slot not in given[SLOTS].tolist()]
        assert all(state[others].isnan().all() for state in found)


@pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_they_are_so_under_every_instruction_set_and_number_of_threads(case, isa, num_threads):
    given = arguments(case)
    expected, states = plain_steps(given)
    assert torch.equal(ops.kda_verify(*given), expected)
    found = commit(given, (5, 1, 2, 8))
    for n, (slot, count) in enumerate(zip(given[SLOTS].tolist(), (5, 1, 2, 8), strict=True)):
        assert all(torch.equal(state[slot], right) for state, right in zip(found, states[n][count], strict=True))


@pytest.mark.parametrize("case", SIZES[:1] + SIZES[-1:], ids=lambda case: case.name)
def test_tokens_that_are_taken_back_leave_nothing(case, backend):
    """Other rejected tokens, infinite ones among them, give the same states to the bit."""
    counts, found = (3, 1, 0, 8), []
    for seed in range(3):
        given = arguments(case)
        noise = torch.Generator().manual_seed(seed)
        for n, count in enumerate(counts):
            rejected = slice(int(given[ENDS][n]) + count, int(given[ENDS][n + 1]))
            for x in given[:6]:
                x[rejected] = torch.randn(x[rejected].shape, generator=noise).to(x.dtype)
                x[rejected] *= torch.inf if seed == 2 else 1
        ops.kda_verify(*given)
        found.append(commit(given, counts))
    for state in found[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, found[0], strict=True))


def test_sequences_beside_one_another_leave_nothing(backend):
    case = SIZES[0]
    alone, together = arguments(case), arguments(case)
    for x in together[:6]:
        x[8:] = torch.nan
    ops.kda_verify(*alone)
    ops.kda_verify(*together)
    slot = int(alone[SLOTS][0])
    for a, b in zip(commit(alone, (4, 1, 1, 1)), commit(together, (4, 1, 1, 1)), strict=True):
        assert torch.equal(a[slot], b[slot])


@pytest.mark.parametrize("count", [-1, 9])
def test_more_tokens_than_the_pass_had_are_refused_and_change_nothing(count, backend):
    given = arguments(SIZES[0])
    ops.kda_verify(*given)
    with pytest.raises(IndexError, match="more tokens than the pass had"):
        commit(given, (count, 1, 0, 8))


def test_a_wide_convolution_state_keeps_its_own_dtype(backend):
    case = MixCase(name="", layout=LAYOUTS["lengths differ"], heads=2, width=16).in_bfloat16()
    given = list(arguments(case))
    given[CONV_STATE] = given[CONV_STATE].float()
    expected, states = plain_steps(tuple(given))
    assert torch.equal(ops.kda_verify(*given), expected)
    counts = (2, 17, 1, 20)
    found = commit(tuple(given), counts)
    assert found[1].dtype is torch.float32
    for n, (slot, count) in enumerate(zip(given[SLOTS].tolist(), counts, strict=True)):
        assert all(torch.equal(state[slot], right) for state, right in zip(found, states[n][count], strict=True))
