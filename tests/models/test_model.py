from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.checkpoint.quantise import load_quantised_state
from perilune.config.model import NormEps
from perilune.errors import CheckpointError
from perilune.models.inputs import ForwardBatch
from perilune.models.layers import Linear
from perilune.models.model import build_model, trainable_model
from perilune.ops.linear import ChannelScaled
from perilune.ops.mxfp4.reference import mxfp4_dequantize
from tests.models.passes import filled_cache, pass_over

TOKENS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88]

# A bank without entries leaves layer 0's attention a single candidate, whose weight is 1 whatever its score.
UNUSED_BY_DESIGN = {
    "model.layers.0.self_attention_res_norm.weight",
    "model.layers.0.self_attention_res_proj.weight",
}
# These only choose experts or rows: what is chosen has no derivative. The indexer is trained by a loss of its own.
CHOOSING = ("e_score_correction_bias", ".indexer.")


def unpacked(state, dtype=torch.float32):
    """The same checkpoint with its experts stored as plain weights."""
    plain = {name: tensor for name, tensor in state.items() if ".weight_" not in name}
    for name in state:
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            plain[base] = mxfp4_dequantize(state[name], state[base + "_scale"], dtype)
    return plain


def trained_twin(config, state):
    """The trainable model with a checkpoint's weights."""
    model, plain = trainable_model(config, NormEps()), unpacked(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts.w" in name:
                prefix, which = name.rsplit(".", 1)
                stack = [plain[f"{prefix}.{expert}.{which}.weight"] for expert in range(config.moe.num_experts)]
                parameter.copy_(torch.stack(stack))
            else:
                parameter.copy_(plain[name])
    return model


def test_the_logits_are_the_golden_ones(model, micro_checkpoint):
    golden = np.load(micro_checkpoint / "golden.npz")
    logits = model(ForwardBatch.whole(torch.from_numpy(golden["token_ids"])[None]))
    expected = torch.from_numpy(golden["logits"])
    assert float((logits - expected).norm() / expected.norm()) < 1e-5


def test_every_parameter_that_can_has_a_finite_gradient_other_than_zero(config, state):
    model = trained_twin(config, state)
    logits = model(ForwardBatch.whole(torch.tensor([TOKENS, TOKENS[::-1]])))
    logits.log_softmax(-1)[:, 7].sum().backward()
    without = set()
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            without.add(name)
        else:
            assert parameter.grad.isfinite().all(), name
    choosing = {name for name, _ in model.named_parameters() if any(word in name for word in CHOOSING)}
    assert len(choosing) == 3 + 2 * 5
    assert without == UNUSED_BY_DESIGN | choosing


def test_every_expert_and_every_head_has_a_gradient(config, state):
    model = trained_twin(config, state)
    model(ForwardBatch.whole(torch.tensor([TOKENS, TOKENS[::-1]])))[:, 7].sum().backward()
    for layer in model.model.layers[1:]:
        experts = layer.block_sparse_moe.experts
        assert all(weight.grad.flatten(1).any(1).all() for weight in (experts.w1, experts.w3, experts.w2))
    slopes = model.model.layers[0].self_attn.A_log.grad
    assert slopes[: config.kda.num_heads].all()
    assert not slopes[config.kda.num_heads :].any()


def test_the_trainable_model_equals_the_built_one(config, state, model):
    batch = ForwardBatch.whole(torch.tensor([TOKENS]))
    assert torch.allclose(trained_twin(config, state)(batch), model(batch), atol=1e-5)


def test_a_step_along_the_gradient_changes_the_loss_as_it_says(config, state):
    model = trained_twin(config, state)
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.experts.rounds_weights = False  # rounding has steps, not slopes
    batch = ForwardBatch.whole(torch.tensor([TOKENS[:6]]))  # too short to select rows

    def loss():
        return model(batch).log_softmax(-1)[:, 7].double().sum()

    loss().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    slope = sum(float(parameter.grad.double().square().sum()) for parameter in parameters)
    step = 1e-3 / slope**0.5
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter in parameters:
                parameter += sign * step * parameter.grad
        values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.02)


# Sums over packed and plain weights may run in different orders.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_unpacked_experts_equal_packed_ones(config, state, dtype, tolerance):
    batch = ForwardBatch.whole(torch.tensor([TOKENS]))
    packed, plain = (build_model(config, given, NormEps(), dtype) for given in (state, unpacked(state)))
    assert torch.allclose(packed(batch), plain(batch), atol=tolerance)
    assert packed(batch).dtype is dtype


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.0.self_attn.A_log",
        "model.layers.3.self_attn.indexer.wk.weight",
        "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale",
        "model.layers.2.block_sparse_moe.experts.3.w2.weight_packed",
    ],
)
def test_a_missing_tensor_is_named(config, state, name):
    without = {key: tensor for key, tensor in state.items() if key != name}
    assert len(without) == len(state) - 1
    with pytest.raises(CheckpointError, match=f"no tensor for the parameter {name}$"):
        build_model(config, without, NormEps(), torch.float32)


def test_building_copies_only_to_change_a_dtype(config, state):
    model = build_model(config, state, NormEps(), torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr(), name
        assert not parameter.requires_grad
    expert = model.model.layers[1].block_sparse_moe.experts.table[2]
    stored = "model.layers.1.block_sparse_moe.experts.2.w3.weight_packed"
    assert expert.w3_packed.data_ptr() == state[stored].data_ptr()


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_float32_model_widens_its_matrices_only_where_no_op_takes_them_as_they_are(
    config, state, model, monkeypatch, multiplies
):
    monkeypatch.setattr("perilune.models.model.multiplies_bfloat16_with", lambda dtype: multiplies)
    built = build_model(config, state, NormEps(), torch.float32)
    kept = {name for name, parameter in built.named_parameters() if parameter.dtype is torch.bfloat16}
    matrices = {name for name, parameter in built.named_parameters() if parameter.ndim == 2}
    others = {name for name in matrices if name.endswith(("kv_b_proj.weight", "res_proj.weight"))}
    assert kept == (matrices - others if multiplies else set())
    assert all(built.get_parameter(name).data_ptr() == state[name].data_ptr() for name in kept)
    batch = ForwardBatch.whole(torch.tensor([TOKENS]))
    assert torch.allclose(built(batch), model(batch), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_take_the_place_of_every_projection(config, micro_checkpoint, dtype):
    quantised = load_quantised_state(micro_checkpoint, config, dtype)
    built = build_model(config, quantised, NormEps(), torch.float32, int8_activations=True)
    linears = {name: module for name, module in built.model.named_modules() if isinstance(module, Linear)}
    assert all(linear.weight is quantised[f"model.{name}.weight"] for name, linear in linears.items())
    assert isinstance(built.lm_head.weight, torch.Tensor)
    assert all(linear.int8_activations for linear in linears.values())
    assert built.model.layers[1].block_sparse_moe.experts.int8_activations
    assert (
        not build_model(config, quantised, NormEps(), torch.float32).model.layers[1].self_attn.o_proj.int8_activations
    )


def test_a_quantised_model_computes_with_the_values_that_its_weights_stand_for(config, state, micro_checkpoint):
    quantised = load_quantised_state(micro_checkpoint, config, torch.int8)
    widened = {
        name: weight.values.float() * weight.scale[:, None] if isinstance(weight, ChannelScaled) else weight
        for name, weight in quantised.items()
    }
    batch = ForwardBatch.whole(torch.tensor([TOKENS]))
    found, expected, exact = (
        build_model(config, given, NormEps(), torch.float32)(batch) for given in (quantised, widened, state)
    )
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, exact, atol=1e-2)


def test_only_the_wanted_rows_have_logits(model):
    tokens = torch.tensor([TOKENS[:6], TOKENS[6:12]])
    everything = model(ForwardBatch.whole(tokens))
    wanted = model(ForwardBatch.whole(tokens, torch.tensor([11, 5])))
    assert torch.allclose(wanted, everything[[11, 5]], atol=1e-6)


def test_the_epsilons_the_configuration_leaves_open_are_used(config, state, model):
    batch = ForwardBatch.whole(torch.tensor([TOKENS]))
    for eps in (NormEps(latent=1e-2), NormEps(l2=1.0), NormEps(indexer=10.0)):
        assert not torch.allclose(build_model(config, state, eps, torch.float32)(batch), model(batch), atol=1e-6)


def test_groups_are_those_of_the_layers_there_are(config, model):
    names = {group.name: group for group in model.cache_groups()}
    assert set(names) == {"latent", "index_keys", "recurrent", "conv"}
    assert [names[name].num_layers for name in ("latent", "index_keys", "recurrent", "conv")] == [2, 2, 2, 2]
    dense = trainable_model(replace(config, arch="k3", indexer=None), NormEps())
    assert {group.name for group in dense.cache_groups()} == {"latent", "recurrent", "conv"}


def long_and_short(model, value):
    """Two sequences interleaved in one cache that starts as `value`: a long prompt, a short one beside its decoding."""
    storage = filled_cache(model, value)
    storage.zero_slots([1, 4])
    long_blocks, short_blocks = [9, 3, 14, 7, 20], [5, 11]
    cache = storage.views
    with torch.inference_mode():
        first = model(pass_over([(TOKENS[:13], 0, long_blocks, 4)], cache))
        both = [(TOKENS[13:14], 13, long_blocks, 4), (TOKENS[2:7], 0, short_blocks, 1)]
        second = model(pass_over(both, cache))
        third = model(pass_over([(TOKENS[7:8], 5, short_blocks, 1), (TOKENS[14:17], 14, long_blocks, 4)], cache))
    return torch.cat((first, second, third))


def test_a_nan_in_an_unused_row_or_in_anothers_state_never_leaks(model):
    assert torch.equal(long_and_short(model, 0.0), long_and_short(model, torch.nan))


def test_a_pass_leaves_rows_and_states_of_others_alone(model):
    storage = filled_cache(model, 3.0)
    storage.zero_slots([2])
    with torch.inference_mode():
        model(pass_over([(TOKENS[:6], 0, [8, 5], 2)], storage.views))
    own = {"latent": [8, 5], "index_keys": [8, 5], "recurrent": [2], "conv": [2]}
    for name, view in storage.views.items():
        others = [place for place in range(view.shape[1]) if place not in own[name]]
        assert (view[:, others] == 3.0).all(), name
    assert (storage.views["latent"][:, 5, 2:] == 3.0).all()
