import json

import pytest

from perilune.checkpoint.names import VISION_PARTS, Part, parameter_name, tensor_table
from perilune.checkpoint.safetensors import read_header
from perilune.config.parse import load_model_config, parse_model_config

LAYER = "language_model.model.layers."


@pytest.fixture(scope="module")
def k31(released_configs):
    return tensor_table(released_configs["k31"])


def test_every_name_of_a_checkpoint_leads_back_to_its_family(micro_checkpoint):
    table = tensor_table(load_model_config(micro_checkpoint))
    names = dict(table.released())
    assert len(names) == sum(family.num_tensors for family in table.families if family.is_released)
    assert all(table.find(name) is family for name, family in names.items())


def test_the_table_counts_as_the_released_index_does(released_configs):
    table = tensor_table(released_configs["k3"])
    released = [family for family in table.families if family.is_released]
    assert sum(family.num_tensors for family in released) == 497220
    assert sum(family.num_tensors * family.tensor_bytes for family in released) == 1560860324864
    assert sum(family.num_tensors for family in released if family.part in VISION_PARTS) == 168


@pytest.mark.parametrize(
    ("name", "part", "shape", "dtypes"),
    [
        ("language_model.model.embed_tokens.weight", Part.EMBEDDING, (163840, 7168), ("BF16",)),
        (LAYER + "0.self_attn.A_log", Part.KDA, (128,), ("F32",)),
        (LAYER + "0.self_attn.q_conv1d.weight", Part.KDA, (12288, 1, 4), ("F32",)),
        (LAYER + "0.mlp.down_proj.weight", Part.DENSE, (7168, 33792), ("BF16",)),
        (LAYER + "2.self_attn.g_proj.weight", Part.KDA, (12288, 7168), ("BF16",)),
        (LAYER + "3.self_attn.g_proj.weight", Part.MLA, (12288, 7168), ("BF16",)),
        (LAYER + "92.self_attn.kv_a_proj_with_mqa.weight", Part.MLA, (576, 7168), ("BF16",)),
        (LAYER + "3.self_attn.indexer.wq_b.weight", Part.INDEXER, (4096, 1536), ("BF16",)),
        (LAYER + "3.self_attn.indexer.k_norm.bias", Part.INDEXER, (128,), ("BF16", "F32")),
        (LAYER + "1.block_sparse_moe.gate.e_score_correction_bias", Part.MOE, (896,), ("F32",)),
        (LAYER + "92.block_sparse_moe.experts.895.w2.weight_packed", Part.EXPERTS, (3584, 1536), ("U8",)),
        (LAYER + "92.block_sparse_moe.experts.895.w1.weight_scale", Part.EXPERTS, (3072, 112), ("U8",)),
        (LAYER + "1.block_sparse_moe.experts.0.w3.weight", Part.EXPERTS, (3072, 3584), ("BF16",)),
        ("mm_projector.proj.2.weight", Part.PROJECTOR, (7168, 4096), ("BF16",)),
        ("vision_tower.encoder.blocks.26.wqkv.weight", Part.VISION, (4608, 1024), ("BF16",)),
        ("vision_tower.patch_embed.proj.weight", Part.VISION, (1024, 3, 14, 14), ("BF16",)),
    ],
)
def test_a_name_has_the_released_form(k31, name, part, shape, dtypes):
    family = k31.find(name)
    assert family is not None
    assert (family.part, family.shape, family.dtypes) == (part, shape, dtypes)


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.embed_tokens.bias",
        "model.norm.weight",
        LAYER + "0.block_sparse_moe.gate.weight",
        LAYER + "1.mlp.up_proj.weight",
        LAYER + "0.self_attn.q_a_proj.weight",
        LAYER + "3.self_attn.A_log",
        LAYER + "0.self_attn.indexer.wk.weight",
        LAYER + "93.input_layernorm.weight",
        LAYER + "01.input_layernorm.weight",
        LAYER + "1.block_sparse_moe.experts.896.w1.weight_packed",
        LAYER + "1.block_sparse_moe.experts.{expert}.w1.weight_packed",
        "vision_tower.encoder.blocks.27.wqkv.weight",
    ],
)
def test_other_names_are_not_in_the_layout(k31, name):
    assert k31.find(name) is None


def test_the_vision_tower_of_another_size_is_in_the_same_table(goldens_dir, fixtures_dir):
    values = json.loads((fixtures_dir / "kimi-k3" / "config.json").read_text())
    values["vision_config"] = json.loads((goldens_dir / "vision-tiny" / "config.json").read_text())["vision_config"]
    values["text_config"] |= {"hidden_size": 256, "num_experts": 16}
    table = tensor_table(parse_model_config(values))
    stored = {}
    for file in (goldens_dir / "vision-tiny").glob("*.safetensors"):
        stored |= {name: entry.shape for name, entry in read_header(file).items()}
    assert stored == {name: family.shape for name, family in table.released() if family.part in VISION_PARTS}


def test_parameters_drop_the_text_prefix():
    assert parameter_name("language_model.model.norm.weight") == "model.norm.weight"
    assert parameter_name("language_model.lm_head.weight") == "lm_head.weight"
