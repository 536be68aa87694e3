import json
import struct

import pytest
import torch

from perilune.checkpoint.index import read_index
from perilune.checkpoint.loader import load_state
from perilune.checkpoint.mapped import MappedFile
from perilune.checkpoint.random_init import random_tensors
from perilune.checkpoint.safetensors import read_header
from perilune.checkpoint.writer import write_checkpoint
from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.errors import CheckpointError


@pytest.fixture
def config(micro_checkpoint):
    return load_model_config(micro_checkpoint)


def test_mapped_tensors_equal_those_of_the_reference_library(goldens_dir):
    from safetensors import safe_open

    directory = goldens_dir / "k31-tiny"
    state = load_state(directory, load_model_config(directory), check_scales=True)
    seen = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as reference:
            for name in reference.keys():  # noqa: SIM118 - not a mapping
                assert torch.equal(state[name.removeprefix("language_model.")], reference.get_tensor(name)), name
                seen += 1
    assert seen == len(state)


def map_tensors(entries):
    """Tensors of the given entries by name, each file mapped once."""
    entries = list(entries)
    files = {file: MappedFile(file) for file in {entry.file for entry in entries}}
    return {entry.name: files[entry.file].tensor(entry) for entry in entries}


def test_nothing_is_copied(micro_checkpoint, config):
    index = read_index(micro_checkpoint)
    tensors = map_tensors(index.entries.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == index.num_files


def test_a_misaligned_tensor_is_read_correctly(tmp_path):
    file = tmp_path / "odd.safetensors"
    values = torch.tensor([1.5, -2.0])
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\7" + values.numpy().tobytes())
    tensors = map_tensors(read_header(file).values())
    assert torch.equal(tensors["floats"], values)
    assert tensors["byte"].tolist() == [7]


def test_a_missing_indexer_bias_comes_as_zeros(micro_checkpoint, config, tmp_path):
    entries = read_index(micro_checkpoint).entries
    kept = {name: tensor for name, tensor in map_tensors(entries.values()).items() if not name.endswith("k_norm.bias")}
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in kept.items()}, tmp_path / "model.safetensors")
    state = load_state(tmp_path, config)
    bias = state["model.layers.1.self_attn.indexer.k_norm.bias"]
    assert bias.shape == (32,)
    assert not bias.any()


def test_vision_tensors_are_mapped_below_their_own_prefix(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 512}
    config = preset_config("tiny", "k3", has_vision=True, sizes=sizes)
    write_checkpoint(tmp_path, config, random_tensors(config, 0))
    state = load_state(tmp_path, config)
    vision = {name for name in state if not name.startswith(("model.", "lm_head."))}
    assert len(vision) == 24
    assert all(name.startswith(("vision.vision_tower.", "vision.mm_projector.")) for name in vision)
    assert state["vision.vision_tower.patch_embed.proj.weight"].shape == (64, 3, 14, 14)


def overwrite(checkpoint, name, offset, value):
    entry = read_index(checkpoint).entries[name]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.begin + offset)
        stream.write(value)


def test_a_value_behind_the_heads_of_a_log_is_refused(checkpoint, config):
    name = "language_model.model.layers.2.self_attn.A_log"
    overwrite(checkpoint, name, 4 * config.kda.num_heads, struct.pack("<f", 1e-3))
    with pytest.raises(CheckpointError, match=rf"{name} has a value other than 0 behind its 2 heads"):
        load_state(checkpoint, config)


def test_a_scale_that_is_not_a_number_is_refused_on_demand(checkpoint, config):
    name = "language_model.model.layers.3.block_sparse_moe.experts.1.w2.weight_scale"
    overwrite(checkpoint, name, 5, b"\xff")
    load_state(checkpoint, config)
    with pytest.raises(CheckpointError, match=rf"{name} holds the scale byte 255"):
        load_state(checkpoint, config, check_scales=True)
