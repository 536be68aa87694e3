import json

import pytest
import torch

from perilune.checkpoint.index import INDEX_NAME, read_index
from perilune.checkpoint.loader import load_state
from perilune.checkpoint.names import Part, parameter_name, tensor_table
from perilune.checkpoint.random_init import random_tensors
from perilune.checkpoint.writer import released_tensors, write_checkpoint
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.errors import CheckpointError
from perilune.ops.mxfp4.reference import mxfp4_dequantize

SIZES = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 512}


@pytest.fixture(scope="module")
def config():
    return preset_config("tiny", "k31", has_vision=True, sizes=SIZES)


def test_what_is_written_in_any_order_is_read_back(tmp_path, config):
    tensors = dict(random_tensors(config, 1))
    write_checkpoint(tmp_path, config, reversed(tensors.items()))
    assert load_model_config(tmp_path) == config
    state = load_state(tmp_path, config, check_scales=True)
    assert state.keys() == {parameter_name(name) for name in tensors}
    assert all(torch.equal(state[parameter_name(name)], tensor) for name, tensor in tensors.items())


def test_the_reference_library_reads_what_is_written(tmp_path, config):
    from safetensors.torch import load_file

    tensors = dict(random_tensors(config, 1))
    write_checkpoint(tmp_path, config, tensors.items())
    read = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        read |= load_file(file)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_shards_are_those_of_the_released_layout(tmp_path, config):
    write_checkpoint(tmp_path, config, random_tensors(config, 0))
    weight_map = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    for name, shard in weight_map.items():
        number = int(shard[6:11])
        if name.startswith("language_model.model.layers."):
            assert number == int(name.split(".")[3]) + 1
        else:
            assert number == {"language_model": 5, "mm_projector": 6, "vision_tower": 7}[name.split(".")[0]]
        assert shard.endswith("-of-000007.safetensors")
    assert all(entry.begin % 4 == 0 for entry in read_index(tmp_path).entries.values() if entry.dtype == "F32")


def test_a_directory_with_files_is_not_written_over(tmp_path, config):
    (tmp_path / "precious").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        write_checkpoint(tmp_path, config, random_tensors(config, 0))


def test_an_unfinished_write_has_no_index(tmp_path, config):
    tensors = dict(random_tensors(config, 0))
    del tensors["language_model.lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"language_model\.lm_head\.weight was not given"):
        write_checkpoint(tmp_path, config, tensors.items())
    with pytest.raises(CheckpointError, match="holds neither"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("language_model.model.norm.bias", torch.zeros(64), "is not a tensor of the released layout"),
        ("language_model.model.norm.weight", torch.zeros(64), r"allowed: \[64\] and torch\.bfloat16"),
        ("language_model.model.norm.weight", torch.zeros(32, dtype=torch.bfloat16), r"has shape \[32\]"),
    ],
)
def test_a_tensor_of_another_form_is_refused(tmp_path, config, name, tensor, expected):
    with pytest.raises(CheckpointError, match=expected):
        write_checkpoint(tmp_path, config, [(name, tensor)])


def test_a_tensor_given_twice_is_refused(tmp_path, config):
    pair = ("language_model.model.norm.weight", torch.ones(64, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match="is given twice"):
        write_checkpoint(tmp_path, config, [pair, pair])


def trained_parameters(config):
    """Float32 parameters as a trainable model holds them: experts stacked, nothing packed."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, family in tensor_table(config).released():
        if family.part is not Part.EXPERTS:
            parameters[name.removeprefix("language_model.")] = torch.randn(family.shape, generator=generator)
    moe = config.moe
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for weight in ("w1", "w2", "w3"):
            shape = (moe.moe_intermediate_size, moe.routed_expert_hidden_size)
            parameters[f"model.layers.{layer}.block_sparse_moe.experts.{weight}"] = torch.randn(
                moe.num_experts, *(shape[::-1] if weight == "w2" else shape), generator=generator
            )
    return parameters


def test_trained_parameters_become_the_released_layout():
    config = preset_config("tiny", "k31", has_vision=False, sizes=SIZES)
    parameters = trained_parameters(config)
    released = dict(released_tensors(config, parameters))
    assert list(released) != []
    assert released.keys() == {name for name, _ in tensor_table(config).released()}
    norm = "language_model.model.norm.weight"
    assert torch.equal(released[norm], parameters["model.norm.weight"].bfloat16())
    base = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    weight = mxfp4_dequantize(released[base + "_packed"], released[base + "_scale"])
    exact = parameters["model.layers.2.block_sparse_moe.experts.w2"][3]
    assert (weight - exact).norm() < 0.2 * exact.norm()


def test_a_missing_parameter_is_named():
    config = preset_config("tiny", "k31", has_vision=False, sizes=SIZES)
    parameters = trained_parameters(config)
    del parameters["model.layers.1.block_sparse_moe.experts.w3"]
    with pytest.raises(CheckpointError, match=r"parameter model\.layers\.1\.block_sparse_moe\.experts\.w3 is missing"):
        dict(released_tensors(config, parameters))
