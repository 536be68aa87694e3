import pytest
import torch

from perilune import ops
from perilune.models.moe import Experts, LatentMoE, TrainableExperts
from perilune.ops.case import largest_error
from perilune.ops.moe import DenseExpert, PackedExpert
from perilune.ops.mxfp4.reference import mxfp4_quantize, mxfp4_round


@pytest.fixture
def z():
    return torch.randn(9, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def choice():
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    return ids, torch.rand(9, 2, generator=generator)


@pytest.fixture
def trainable(config):
    torch.manual_seed(2)
    experts = TrainableExperts(config, torch.float32)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def test_the_chosen_weights_sum_to_one(model):
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(0))
    for layer in model.model.layers[1:]:
        ids, weights = layer.block_sparse_moe.gate(x)
        assert torch.allclose(weights.sum(-1), torch.ones(33))
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "an expert was chosen twice"


def test_trained_experts_are_seen_as_they_will_be_stored(config, trainable, z, choice):
    stored = []
    for w1, w3, w2 in zip(trainable.w1, trainable.w3, trainable.w2, strict=True):
        stored.append(PackedExpert(*(part for weight in (w1, w3, w2) for part in mxfp4_quantize(weight.detach()))))
    assert largest_error(trainable(z, *choice).detach(), Experts(config, stored)(z, *choice)) < 1e-5


def test_rounding_can_be_switched_off(config, trainable, z, choice):
    rounded = trainable(z, *choice)
    trainable.rounds_weights = False
    dense = [DenseExpert(*weights) for weights in zip(trainable.w1, trainable.w3, trainable.w2, strict=True)]
    assert torch.equal(trainable(z, *choice), Experts(config, dense)(z, *choice))
    assert not torch.allclose(trainable(z, *choice), rounded)


def test_gradients_reach_the_weights_through_the_rounding(trainable, z, choice):
    trainable(z, *choice).sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in trainable.parameters())
    assert not torch.equal(mxfp4_round(trainable.w1), trainable.w1)


def test_the_norm_follows_the_weighted_sum(config):
    """So a common factor on all experts vanishes."""

    class Scaled(torch.nn.Module):
        factor = 1.0

        def forward(self, z, *_):
            return self.factor * z

    torch.manual_seed(0)
    moe = LatentMoE(config, Scaled(), torch.float32)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 32)
    before = moe(x)
    Scaled.factor = 8.0
    assert torch.allclose(before, moe(x), rtol=1e-4, atol=1e-3)


def test_shared_experts_are_added_in_full_width(model):
    moe = model.model.layers[1].block_sparse_moe
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    ids, weights = moe.gate(x)
    routed = moe.experts(ops.dense_linear(x, moe.routed_expert_down_proj.weight), ids, weights)
    routed = moe.routed_expert_up_proj(moe.routed_expert_norm(routed))
    assert torch.equal(moe(x), routed + moe.shared_experts(x))
