import torch

from perilune.checkpoint.random_init import random_tensors
from perilune.config.presets import preset_config
from perilune.ops.mxfp4.reference import mxfp4_dequantize

SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 512}


def tensors(seed):
    return dict(random_tensors(preset_config("tiny", "k31", has_vision=False, sizes=SIZES), seed))


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = tensors(5), tensors(5), tensors(6)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("layers.1", "layers.2")])


def test_linears_keep_the_scale_of_their_input():
    drawn = tensors(0)
    weight = drawn["language_model.model.layers.1.self_attn.q_proj.weight"].float()
    assert abs(weight.std() * weight.shape[1] ** 0.5 - 1) < 0.05
    base = "language_model.model.layers.2.block_sparse_moe.experts.1.w1.weight"
    expert = mxfp4_dequantize(drawn[base + "_packed"], drawn[base + "_scale"])
    assert abs(expert.std() * expert.shape[1] ** 0.5 - 1) < 0.05


def test_a_log_ends_in_zeros_and_scales_are_numbers():
    drawn = tensors(0)
    a_log = drawn["language_model.model.layers.0.self_attn.A_log"]
    assert a_log[:4].all()
    assert not a_log[4:].any()
    assert all((tensor < 255).all() for name, tensor in drawn.items() if name.endswith("weight_scale"))
