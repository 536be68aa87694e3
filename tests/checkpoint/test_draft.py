import json

import pytest
import torch
from safetensors.torch import save_file

from perilune.checkpoint.draft import draft_shapes, load_draft_state
from perilune.config.draft import load_draft_config, parse_draft_config
from perilune.errors import CheckpointError
from tests.drafts import gqa_values, mla_values, write_draft

SHAPES = {"mla": mla_values, "gqa": gqa_values}


@pytest.fixture(params=sorted(SHAPES))
def values(request):
    return SHAPES[request.param]()


def refusal(directory, values, tensors):
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_draft_state(directory, parse_draft_config(values))
    return str(caught.value)


def test_every_tensor_is_mapped_once_under_one_set_of_names(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    config = load_draft_config(tmp_path)
    state = load_draft_state(tmp_path, config)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == draft_shapes(config)
    assert len(state) == len(tensors)
    first = "context_proj.weight" if config.is_latent else "fc.weight"
    assert torch.equal(state["context_proj.weight"], tensors[first])


@pytest.mark.parametrize("name", ["mla", "mla_causal", "gqa"])
def test_the_golden_drafts_are_mapped(goldens_dir, name):
    directory = goldens_dir / "dspark-tiny" / name
    config = load_draft_config(directory)
    assert load_draft_state(directory, config).keys() == draft_shapes(config).keys()


def test_copies_of_the_targets_tables_and_an_unused_head_are_left_out(tmp_path):
    values = mla_values() | {"enable_confidence_head": False}
    tensors = write_draft(tmp_path, mla_values())
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(512, 64, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    config = parse_draft_config(values)
    state = load_draft_state(tmp_path, config)
    assert state.keys() == draft_shapes(config).keys()
    assert not any("confidence" in name for name in state)


def test_a_missing_tensor_is_named(tmp_path, values):
    for name in sorted(write_draft(tmp_path, values)):
        tensors = write_draft(tmp_path, values)
        del tensors[name]
        message = refusal(tmp_path, values, tensors)
        assert name in message
        assert "missing" in message


@pytest.mark.parametrize("name", ["layers.2.input_layernorm.weight", "d2t", "layers.0.self_attn.q_proj.bias", "norm"])
def test_an_unexpected_tensor_is_named(tmp_path, values, name):
    tensors = write_draft(tmp_path, values) | {name: torch.zeros(64, dtype=torch.bfloat16)}
    assert name in refusal(tmp_path, values, tensors)


def test_a_wrong_shape_names_found_and_allowed(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    name = "context_proj.weight" if "context_proj.weight" in tensors else "fc.weight"
    tensors[name] = torch.zeros(64, 128, dtype=torch.bfloat16)  # one tap less than the configuration lists
    message = refusal(tmp_path, values, tensors)
    assert name in message
    assert "[64, 128]" in message
    assert "[64, 192]" in message


def test_a_copy_of_another_embedding_is_refused(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    tensors["embed_tokens.weight"] = torch.zeros(768, 64, dtype=torch.bfloat16)
    message = refusal(tmp_path, values, tensors)
    assert "[768, 64]" in message
    assert "[512, 64]" in message


def test_another_dtype_is_refused(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    name = "layers.0.mlp.up_proj.weight"
    assert "U8" in refusal(tmp_path, values, tensors | {name: torch.zeros(96, 64, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("own", "other", "found", "said"), [("mla", "gqa", "MLA", "GQA"), ("gqa", "mla", "GQA", "MLA")]
)
def test_tensors_of_one_shape_under_the_configuration_of_the_other(tmp_path, own, other, found, said):
    tensors = write_draft(tmp_path, SHAPES[own]())
    message = refusal(tmp_path, SHAPES[other](), tensors)
    assert f"a tensor of a {found} draft" in message
    assert f"describes a {said}" in message


def test_a_draft_with_an_output_gate_is_refused_by_its_tensors(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    tensors["layers.1.self_attn.g_proj.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    message = refusal(tmp_path, values, tensors)
    assert "layers.1.self_attn.g_proj.weight" in message
    assert "output gate" in message


def test_shards_are_read_through_their_index(tmp_path, values):
    tensors = write_draft(tmp_path, values)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / shard)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(load_draft_state(tmp_path, load_draft_config(tmp_path))) == len(tensors)
