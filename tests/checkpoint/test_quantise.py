import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.checkpoint.names import tensor_table
from perilune.checkpoint.quantise import load_quantised_state
from perilune.config.parse import load_model_config
from perilune.models.accounting import account
from perilune.ops.linear import ChannelScaled
from perilune.ops.linear.reference import quantize_rows
from perilune.ops.linear.weights import unfilled

PROJECTIONS = {
    "kda": ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_a_proj", "f_b_proj", "o_proj"],
    "mla": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj", "o_proj"],
    "indexer": ["indexer.wq_b", "indexer.wk", "indexer.weights_proj"],
    "dense": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    "moe": ["routed_expert_down_proj", "routed_expert_up_proj"]
    + [f"shared_experts.{name}_proj" for name in ("gate", "up", "down")],
}


def test_projections_are_the_linear_maps_of_the_layers_and_nothing_else(released_configs):
    table = tensor_table(released_configs["k31"])
    found = [family.pattern.split("{layer}.")[1] for family in table.families if family.is_projection]
    expected = [f"self_attn.{name}.weight" for kind in ("kda", "mla", "indexer") for name in PROJECTIONS[kind]]
    expected += [f"{name}.weight" for name in PROJECTIONS["dense"]]
    expected += [f"block_sparse_moe.{name}.weight" for name in PROJECTIONS["moe"]]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_projections_are_quantised_and_the_rest_is_as_stored(micro_checkpoint, dtype):
    config = load_model_config(micro_checkpoint)
    stored, state = load_state(micro_checkpoint, config), load_quantised_state(micro_checkpoint, config, dtype)
    assert state.keys() == stored.keys()
    quantised = {name: weight for name, weight in state.items() if isinstance(weight, ChannelScaled)}
    table = tensor_table(config)
    assert quantised.keys() == {name for name in stored if table.find(f"language_model.{name}").is_projection}
    for name, weight in quantised.items():
        expected = unfilled(*stored[name].shape, dtype)
        quantize_rows(stored[name], expected)
        assert torch.equal(weight.values.float(), expected.values.float()), name
        assert torch.equal(weight.scale, expected.scale), name
    for name in stored.keys() - quantised.keys():
        assert torch.equal(state[name], stored[name]), name


def test_the_account_knows_what_is_made(micro_checkpoint):
    config = load_model_config(micro_checkpoint)
    state = load_quantised_state(micro_checkpoint, config, torch.int8)
    made = [weight for weight in state.values() if isinstance(weight, ChannelScaled)]
    totals = account(config, is_quantised=True)
    assert totals.converted_bytes == sum(weight.values.nbytes + weight.scale.nbytes for weight in made)
    saved = sum(weight.values.nbytes - weight.scale.nbytes for weight in made)
    assert totals.total_size == account(config).total_size - saved
    assert account(config).converted_bytes == 0
