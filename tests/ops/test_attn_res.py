import torch

from perilune import ops
from perilune.ops.attn_res.reference import mix
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def naive_mix(candidates, query, eps):
    """Token after token: softmax over candidates of rms(v) . query, then the weighted sum of the raw v."""
    out = []
    for t in range(candidates[0].shape[0]):
        values = [candidate[t].double() for candidate in candidates]
        scores = torch.stack([(v / torch.sqrt((v * v).mean() + eps) * query.double()).sum() for v in values])
        weights = torch.exp(scores - scores.max())
        weights = weights / weights.sum()
        out.append(sum(weight * v for weight, v in zip(weights, values, strict=True)))
    return torch.stack(out)


def naive(candidates, query, norm_weight, eps):
    mixed = naive_mix(candidates, query, eps)
    return mixed / torch.sqrt((mixed * mixed).mean(-1, keepdim=True) + eps) * norm_weight.double()


@cases("attn_res_mix")
def test_the_mix_follows_the_formula(op_name, case):
    given = make_arguments(op_name, case)
    x, after = call(op_name, given)
    assert x.dtype is case.dtype
    assert_close(naive(*given), x, case.tolerance)
    assert all(torch.equal(left, right) for left, right in zip(given[0], after[0], strict=True))


def test_a_lone_candidate_is_its_own_mix_to_the_bit():
    for dtype in (torch.float32, torch.bfloat16):
        candidate = torch.randn(5, 96).to(dtype)
        assert torch.equal(mix([candidate], torch.randn(96), 1e-5), candidate)


def test_a_token_does_not_depend_on_the_others():
    candidates, *rest = make_arguments("attn_res_mix", case_named("attn_res_mix", "near equal scores"))
    alone = ops.attn_res_mix([candidate[4:5] for candidate in candidates], *rest)
    assert torch.allclose(alone, ops.attn_res_mix(candidates, *rest)[4:5], rtol=1e-6, atol=1e-7)


def test_gradients_are_those_of_the_formula():
    candidates, *rest = make_arguments("attn_res_mix", case_named("attn_res_mix", "near equal scores"))
    stacked = torch.stack(candidates)[:, 1:3]
    rest[0] = 100 * rest[0]

    def of(function):
        return lambda values, *others: function(list(values), *others)

    assert_gradients_agree(of(ops.attn_res_mix), of(naive), (stacked, *rest), [0, 1, 2])
