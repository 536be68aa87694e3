from dataclasses import replace

import pytest
import torch
from torch import nn

from perilune import ops
from perilune.config.model import NormEps
from perilune.models.block import DecoderLayer, MixingQuery
from perilune.models.inputs import ForwardBatch
from perilune.models.layers import Weight
from perilune.models.model import Backbone


class Recorder(nn.Module):
    """Stands for a sublayer: keeps its input, adds to it a constant of its own."""

    def __init__(self, constant):
        super().__init__()
        self.constant, self.seen = constant, None

    def forward(self, x, *_):
        self.seen = x
        return torch.full_like(x, self.constant)


@pytest.fixture
def make_layer(config):
    def make(index):
        torch.manual_seed(index)
        layer = DecoderLayer(replace(config, attn_res_block_size=3), NormEps(), index, 0, None, torch.float32)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        layer.self_attn, layer.mlp = Recorder(2.0), Recorder(5.0)
        return layer

    return make


def tensors(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 32, generator=generator) for _ in range(count)]


def mixed(layer, candidates, which):
    query = getattr(layer, f"{which}_res_norm").weight * getattr(layer, f"{which}_res_proj").weight[0]
    norm = layer.input_layernorm if which == "self_attention" else layer.post_attention_layernorm
    return ops.attn_res_mix(candidates, query, norm.weight, 1e-5)


def test_the_first_layers_attention_mix_is_the_identity(make_layer):
    layer, (embedding,) = make_layer(0), tensors(1)
    layer([], embedding, None)
    assert torch.equal(layer.self_attn.seen, layer.input_layernorm(embedding))


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_boundary_layer_banks_the_raw_prefix_and_restarts_the_sum(make_layer, index):
    layer, (*bank, prefix) = make_layer(index), tensors(1 + index // 3)
    after, sum_after = layer(bank, prefix, None)
    assert len(after) == len(bank) + 1
    assert after[-1] is prefix
    assert all(kept is entry for kept, entry in zip(after, bank, strict=False))
    assert torch.equal(sum_after, torch.full((4, 32), 2.0 + 5.0))


@pytest.mark.parametrize("index", [1, 2, 4])
def test_other_layers_add_to_the_prefix_and_leave_the_bank(make_layer, index):
    layer, (*bank, prefix) = make_layer(index), tensors(3)
    after, sum_after = layer(bank, prefix, None)
    assert after is bank
    assert torch.equal(sum_after, prefix + 2.0 + 5.0)


def test_the_attention_of_a_boundary_layer_sees_the_old_bank_and_its_feed_forward_the_new_one(make_layer):
    layer, (*bank, prefix) = make_layer(3), tensors(2)
    layer(bank, prefix, None)
    assert torch.equal(layer.self_attn.seen, mixed(layer, [*bank, prefix], "self_attention"))
    attended = torch.full((4, 32), 2.0)
    assert torch.equal(layer.mlp.seen, mixed(layer, [*bank, prefix, attended], "mlp"))


def test_a_layer_does_not_change_the_callers_bank(make_layer):
    *bank, prefix = tensors(3)
    copies = [entry.clone() for entry in bank]
    make_layer(3)(bank, prefix, None)
    assert len(bank) == 2
    assert all(torch.equal(entry, copy) for entry, copy in zip(bank, copies, strict=True))


def test_the_released_depth_mixes_one_to_nine_candidates(config, monkeypatch):
    """93 layers in blocks of 12: the bank grows to 8 entries, and the last mix sees those and the prefix."""
    deep = replace(
        config, num_hidden_layers=93, attn_res_block_size=12, first_k_dense_replace=93, full_attn_layers=(92,)
    )
    backbone = Backbone(deep, NormEps(), [None] * 93, torch.float32)
    for layer in backbone.layers:
        layer.self_attn, layer.mlp = Recorder(1.0), Recorder(1.0)
    counts = []
    monkeypatch.setattr(ops, "attn_res_mix", lambda candidates, *_: counts.append(len(candidates)) or candidates[-1])
    backbone(ForwardBatch.whole(torch.tensor([[1, 2]])))
    banked = [-(-layer // 12) for layer in range(93)]  # before each layer's attention
    expected = [count for layer in range(93) for count in (banked[layer] + 1, layer // 12 + 2)]
    assert counts == [*expected, 9]
    assert (counts[0], counts[1]) == (1, 2)


@pytest.fixture
def query():
    norm, proj = Weight(8, dtype=torch.float32), Weight(1, 8, dtype=torch.float32)
    for weight in (norm, proj):
        nn.init.normal_(weight.weight)
    return MixingQuery(norm, proj)


def test_gradients_flow_through_the_query_of_trained_weights(query):
    norm, proj = query._norm.weight, query._proj.weight
    query().sum().backward()
    assert torch.equal(norm.grad, proj[0])
    assert torch.equal(proj.grad[0], norm)


def test_trained_weights_are_multiplied_anew_after_a_step(query):
    with torch.no_grad():
        before = query()
        query._norm.weight += 1
        assert not torch.equal(query(), before)
        assert torch.equal(query(), query._norm.weight * query._proj.weight[0])


@pytest.mark.parametrize("assign", [False, True])
def test_frozen_weights_are_multiplied_once_until_others_are_loaded(query, assign):
    for weight in (query._norm, query._proj):
        weight.requires_grad_(False)
    with torch.inference_mode():
        before = query()
        assert query() is before
    assert not before.is_inference()
    query._norm.load_state_dict({"weight": torch.arange(8.0)}, assign=assign)
    query._norm.requires_grad_(False)
    assert torch.equal(query(), torch.arange(8.0) * query._proj.weight[0])
