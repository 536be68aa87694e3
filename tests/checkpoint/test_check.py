import json
from dataclasses import replace

import pytest

from perilune.checkpoint.check import check_index
from perilune.checkpoint.index import CheckpointIndex, read_index
from perilune.config.parse import load_model_config
from perilune.errors import CheckpointError

LAYER = "language_model.model.layers."
EXPERT = LAYER + "1.block_sparse_moe.experts.2.w1."


@pytest.fixture
def config(micro_checkpoint):
    return load_model_config(micro_checkpoint)


@pytest.fixture
def index(micro_checkpoint):
    return read_index(micro_checkpoint)


def changed(index, **changes):
    """The index with entries replaced, or left out where the change is None."""
    entries = dict(index.entries)
    for name, entry in changes.items():
        if entry is None:
            del entries[name]
        else:
            entries[name] = replace(entry, name=name)
    return CheckpointIndex(index.directory, entries, index.num_files)


def refusal(index, config):
    with pytest.raises(CheckpointError) as caught:
        check_index(index, config)
    assert str(index.directory) in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_passes(index, config):
    assert check_index(index, config).keys() == index.entries.keys()


def test_a_missing_tensor_is_named(index, config):
    name = LAYER + "1.self_attn.q_b_proj.weight"
    assert f"tensor {name} is missing" in refusal(changed(index, **{name: None}), config)


@pytest.mark.parametrize("leaf", ["weight_packed", "weight_scale"])
def test_half_a_packed_expert_is_refused(index, config, leaf):
    assert f"tensor {EXPERT}{leaf} is missing" in refusal(changed(index, **{EXPERT + leaf: None}), config)


def test_an_unknown_tensor_is_named_with_its_file(index, config):
    name = LAYER + "1.self_attn.rotary.weight"
    message = refusal(changed(index, **{name: index.entries["language_model.model.norm.weight"]}), config)
    assert f"unexpected tensor {name}" in message
    assert "model-00005-of-000005.safetensors" in message


def test_a_wrong_shape_names_found_and_allowed(index, config):
    name = LAYER + "0.mlp.up_proj.weight"
    message = refusal(changed(index, **{name: replace(index.entries[name], shape=(32, 64))}), config)
    assert f"{name} has shape [32, 64]" in message
    assert "allows [64, 32]" in message


def test_a_wrong_dtype_names_found_and_allowed(index, config):
    name = LAYER + "0.self_attn.A_log"
    message = refusal(changed(index, **{name: replace(index.entries[name], dtype="BF16")}), config)
    assert f"{name} has dtype BF16; allowed: F32" in message


def test_the_indexer_norm_may_be_f32_and_lack_its_bias(index, config):
    prefix = LAYER + "1.self_attn.indexer.k_norm."
    entry = replace(index.entries[prefix + "weight"], dtype="F32")
    check_index(changed(index, **{prefix + "weight": entry, prefix + "bias": None}), config)


def test_an_expert_may_be_stored_unpacked(index, config):
    plain = replace(index.entries[EXPERT + "weight_packed"], shape=(32, 32), dtype="BF16")
    packed = {EXPERT + "weight_packed": None, EXPERT + "weight_scale": None}
    families = check_index(changed(index, **packed, **{EXPERT + "weight": plain}), config)
    assert families[EXPERT + "weight"].shape == (32, 32)
    assert "allowed: one of the two" in refusal(changed(index, **{EXPERT + "weight": plain}), config)


def test_layers_behind_the_last_are_left_out_with_a_warning(index, config, caplog):
    name = LAYER + "4.draft.weight"
    families = check_index(changed(index, **{name: index.entries["language_model.model.norm.weight"]}), config)
    assert name not in families
    assert "layers 4 are not used" in caplog.text


def test_the_kind_of_a_layer_is_what_is_stored(micro_checkpoint, index):
    from perilune.config.parse import parse_model_config

    values = json.loads((micro_checkpoint / "config.json").read_text())
    values["text_config"]["linear_attn_config"] |= {"full_attn_layers": [1, 4], "kda_layers": [2, 3]}
    values["text_config"]["dsa_config"]["dsa_layers"] = [1, 4]
    message = refusal(index, parse_model_config(values))
    assert LAYER + "0.self_attn.A_log makes layer 0 a KDA layer" in message
    assert "config.json lists it (as 1) in full_attn_layers" in message


def test_vision_tensors_need_a_vision_config(index, config):
    name = "mm_projector.proj.0.weight"
    message = refusal(changed(index, **{name: index.entries["language_model.model.norm.weight"]}), config)
    assert f"unexpected tensor {name}" in message
