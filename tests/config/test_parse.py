import copy
import json
from dataclasses import replace

import pytest

from perilune.config.model import IndexerConfig
from perilune.config.parse import load_model_config, model_config_to_dict, parse_model_config
from perilune.errors import ConfigError


@pytest.fixture
def values(micro_checkpoint):
    return json.loads((micro_checkpoint / "config.json").read_text())


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        parse_model_config(values)
    return str(caught.value)


def test_the_released_k3_configuration_is_understood(fixtures_dir):
    config = load_model_config(fixtures_dir / "kimi-k3")
    assert (config.arch, config.num_hidden_layers, config.moe.num_experts) == ("k3", 93, 896)
    assert config.full_attn_layers == (*range(3, 92, 4), 92)
    assert len(config.kda_layers) == 69
    assert config.indexer is None
    assert config.vision is not None
    assert config.vision.vt_num_hidden_layers == 27


def test_the_k31_configuration_adds_only_the_indexer(fixtures_dir):
    k3 = load_model_config(fixtures_dir / "kimi-k3")
    k31 = load_model_config(fixtures_dir / "kimi-k3.1-pro" / "config.json")
    assert k31.indexer == IndexerConfig(num_heads=32, head_dim=128, topk=2048)
    assert replace(k31, arch="k3", indexer=None) == k3


@pytest.mark.parametrize("name", ["fixtures/kimi-k3", "fixtures/kimi-k3.1-pro", "golden/k3-tiny", "golden/k31-tiny"])
def test_writing_and_reading_gives_the_same_configuration(goldens_dir, fixtures_dir, name):
    kind, _, leaf = name.partition("/")
    config = load_model_config((goldens_dir if kind == "golden" else fixtures_dir) / leaf)
    assert parse_model_config(json.loads(json.dumps(model_config_to_dict(config)))) == config


def test_library_defaults_are_accepted_with_any_value(values):
    expected = parse_model_config(values)
    noise = {
        "auto_map": {"AutoConfig": "x.Y"},
        "temperature": 0.3,
        "top_k": 50,
        "transformers_version": "5",
        "id2label": {},
    }
    values |= noise
    values["text_config"] |= {**noise, "head_dim": 74, "use_cache": False, "pruned_heads": {}}
    assert parse_model_config(values) == expected


def test_vision_and_media_keys_are_optional(values, fixtures_dir):
    released = json.loads((fixtures_dir / "kimi-k3" / "config.json").read_text())
    del released["vision_config"], released["media_placeholder_token_id"], released["image_placeholder"]
    config = parse_model_config(released)
    assert config.vision is None
    assert config.media_placeholder_token_id is None


def test_quantization_may_be_absent(values):
    del values["text_config"]["quantization_config"]
    parse_model_config(values)


ALIASES = [
    {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 5, "dsa_layers": [2, 4]},
    {"n_heads": 8, "head_dim": 64, "top_k": 5, "layers": [2, 4], "types": ["full", "full"]},
    {"num_heads": 8, "head_dim": 64, "topk": 5, "full_attn_layers": [2, 4], "indexer_types": "full"},
]


@pytest.mark.parametrize("dsa", ALIASES)
@pytest.mark.parametrize("at_top_level", [True, False])
def test_indexer_keys_have_aliases_at_either_level(values, dsa, at_top_level):
    del values["text_config"]["dsa_config"]
    (values if at_top_level else values["text_config"])["dsa_config"] = dsa
    assert parse_model_config(values).indexer == IndexerConfig(num_heads=8, head_dim=64, topk=5)


def test_absent_indexer_sizes_are_the_released_ones(values):
    values["text_config"]["dsa_config"] = {}
    assert parse_model_config(values).indexer == IndexerConfig(num_heads=32, head_dim=128, topk=2048)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            "architectures",
            ["LlamaForCausalLM"],
            ["architectures", "Llama", "KimiK31ForConditionalGeneration"],
        ),
        ("model_type", "kimi_k3", ["model_type", '"kimi_k3"', '"kimi_k31"']),
        ("dtype", "float16", ["dtype", '"float16"', '"bfloat16"']),
        ("tie_word_embeddings", True, ["tie_word_embeddings", "true", "false"]),
        ("text_config.hidden_act", "silu", ["text_config.hidden_act", '"silu"', '"situ"']),
        ("text_config.mla_use_nope", False, ["mla_use_nope", "false", "true"]),
        ("text_config.num_nextn_predict_layers", 1, ["num_nextn_predict_layers", "1", "0"]),
        ("text_config.num_expert_group", 2, ["num_expert_group", "2"]),
        ("text_config.topk_method", "greedy", ["topk_method", "noaux_tc"]),
        ("text_config.latent_moe_use_norm", False, ["latent_moe_use_norm", "true"]),
        ("text_config.hidden_size", "64", ["hidden_size", '"64"', "integer"]),
        ("text_config.hidden_size", True, ["hidden_size", "true", "integer"]),
        ("text_config.num_experts", 0, ["num_experts", "0", "at least 1"]),
        ("text_config.num_experts_per_token", 5, ["num_experts_per_token", "5", "num_experts, 4"]),
        ("text_config.moe_intermediate_size", 40, ["moe_intermediate_size", "40", "multiple of 32"]),
        ("text_config.num_key_value_heads", 1, ["num_key_value_heads", "1", "2"]),
        ("text_config.rms_norm_eps", float("nan"), ["rms_norm_eps", "NaN", "finite"]),
        ("text_config.activation_situ_beta", 0, ["activation_situ_beta", "0", "above 0"]),
        ("architectures", [["x"]], ["architectures", '[["x"]]']),
        ("text_config.first_k_dense_replace", 5, ["first_k_dense_replace", "5", "4"]),
        ("text_config.eos_token_id", 7, ["eos_token_id", "1", "7", "agree"]),
        ("text_config.linear_attn_config.use_full_rank_gate", False, ["use_full_rank_gate", "true"]),
        ("text_config.linear_attn_config.gate_lower_bound", -8, ["gate_lower_bound", "-8", "-5"]),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 3], ["kda_layers", "exactly once"]),
        ("text_config.linear_attn_config.kda_layers", [1, 5], ["kda_layers", "[1, 5]", "1 to 4"]),
        ("text_config.num_hidden_layers", 10**30, ["kda_layers", "exactly once"]),
        ("text_config.linear_attn_config.full_attn_layers", [4, 2], ["full_attn_layers", "ascending"]),
        ("text_config.quantization_config.format", "nvfp4", ["format", '"nvfp4"', "mxfp4-pack-quantized"]),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, ["group_size", "16", "32"]),
        ("text_config.dsa_config.dsa_layers", [2], ["dsa_layers", "[2]", "linear_attn_config.full_attn_layers"]),
        ("text_config.dsa_config.types", ["full", "shared"], ["types", "shared", "full"]),
        ("text_config.dsa_config.topk", 3, ["index_topk", "topk", "keep one"]),
    ],
)
def test_an_unsupported_value_names_key_found_and_allowed(values, path, value, expected):
    section = values
    *parents, key = path.split(".")
    for parent in parents:
        section = section[parent]
    section[key] = value
    message = refusal(values)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    "section",
    [
        "",
        "text_config",
        "text_config.linear_attn_config",
        "text_config.dsa_config",
        "text_config.quantization_config",
        "text_config.quantization_config.config_groups",
        "text_config.quantization_config.config_groups.group_0",
        "text_config.quantization_config.config_groups.group_0.weights",
    ],
)
def test_an_unknown_key_is_refused_at_every_level(values, section):
    target = values
    for name in filter(None, section.split(".")):
        target = target[name]
    target["surprise"] = 1
    message = refusal(values)
    assert f"{section}.surprise".removeprefix(".") in message
    assert "allowed here: " in message


def test_a_misspelt_key_is_answered_with_the_right_one(values):
    values["text_config"]["rms_norm_epsilon"] = values["text_config"]["rms_norm_eps"]
    assert "did you mean rms_norm_eps?" in refusal(values)


def test_a_missing_key_is_named(values):
    del values["text_config"]["q_lora_rank"]
    assert "text_config.q_lora_rank is missing" in refusal(values)


@pytest.mark.parametrize("key", ["norm_type", "projector_hidden_act", "surprise"])
def test_another_vision_tower_is_refused(fixtures_dir, key):
    released = json.loads((fixtures_dir / "kimi-k3" / "config.json").read_text())
    released["vision_config"][key] = "other"
    assert f"vision_config.{key}" in refusal(released)


def test_the_vision_tower_must_end_in_the_text_width(fixtures_dir):
    released = json.loads((fixtures_dir / "kimi-k3" / "config.json").read_text())
    released["vision_config"]["text_hidden_size"] = 4096
    assert "7168" in refusal(released)


def test_an_indexer_belongs_to_k31_alone(values):
    k3 = copy.deepcopy(values)
    k3 |= {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    assert "dsa_config" in refusal(k3)
    del values["text_config"]["dsa_config"]
    assert "dsa_config" in refusal(values)


def test_a_vision_tower_alone_is_refused(goldens_dir):
    with pytest.raises(ConfigError, match=r"vision-tiny/config\.json: text_config is missing"):
        load_model_config(goldens_dir / "vision-tiny")


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    for text in ("{", "[" * 10**5):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json cannot be read as JSON"):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        load_model_config(tmp_path)
