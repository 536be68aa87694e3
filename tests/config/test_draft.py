import copy
import json
from dataclasses import replace

import pytest

from perilune.config.draft import DraftOverrides, GQAConfig, check_fit, load_draft_config, parse_draft_config
from perilune.config.model import MLAConfig
from perilune.config.parse import load_model_config
from perilune.errors import ConfigError
from tests.drafts import gqa_values, mla_values

SHAPES = {"mla": mla_values, "gqa": gqa_values}


@pytest.fixture(params=sorted(SHAPES))
def values(request):
    return SHAPES[request.param]()


def refusal(values, overrides=DraftOverrides()):
    with pytest.raises(ConfigError) as caught:
        parse_draft_config(values, overrides)
    return str(caught.value)


def changed(values, path, value):
    values = copy.deepcopy(values)
    *outer, leaf = path.split(".")
    section = values
    for key in outer:
        section = section.setdefault(key, {})
    section[leaf] = value
    return values


def test_both_published_shapes_are_understood():
    mla, gqa = parse_draft_config(mla_values()), parse_draft_config(gqa_values())
    assert mla.attention == MLAConfig(2, 32, 48, 32, 16, 32)
    assert (mla.target_num_hidden_layers, mla.target_layer_ids, mla.block_size) == (8, (2, 3, 6), None)
    assert (mla.rope.is_interleaved, mla.rope.width, mla.rope.theta) == (True, 16, 50000.0)
    assert gqa.attention == GQAConfig(4, 2, 32)
    assert (gqa.target_num_hidden_layers, gqa.target_layer_ids, gqa.num_trained_drafts) == (8, (0, 4, 6), 5)
    assert (gqa.rope.is_interleaved, gqa.rope.width) == (False, 32)
    assert (mla.has_confidence_head, gqa.has_confidence_head) == (True, False)
    assert not mla.is_causal
    assert not gqa.is_causal


@pytest.mark.parametrize("name", ["mla", "mla_causal", "gqa"])
def test_the_golden_drafts_are_understood_and_fit_their_target(goldens_dir, name):
    config = load_draft_config(goldens_dir / "dspark-tiny" / name)
    check_fit(config, load_model_config(goldens_dir / "k31-tiny"), 7)
    assert config.is_causal == (name == "mla_causal")


def test_the_architecture_may_be_missing(values):
    expected = parse_draft_config(values)
    del values["architectures"]
    assert parse_draft_config(values) == expected


def test_keys_of_the_block_may_lie_at_either_level(values):
    expected, block = parse_draft_config(values), values.pop("dflash_config", {})
    assert parse_draft_config(values | block) == expected
    nested = {key: values.pop(key) for key in ("target_layer_ids", "mask_token_id", "markov_rank") if key in values}
    assert parse_draft_config(values | {"dflash_config": block | nested}) == expected


@pytest.mark.parametrize("path", ["dflash_config.causal", "full_attention_causal", "is_causal"])
@pytest.mark.parametrize("value", [True, False])
def test_each_key_of_causality_is_read(values, path, value):
    assert parse_draft_config(changed(values, path, value)).is_causal is value


def test_contradicting_causality_is_refused(values):
    values = changed(changed(values, "dflash_config.causal", True), "is_causal", False)
    message = refusal(values)
    assert "dflash_config.causal" in message
    assert "is_causal" in message
    assert parse_draft_config(changed(values, "is_causal", True)).is_causal


def test_a_block_that_does_not_draft_from_its_anchor_yields_one_less():
    config = parse_draft_config(changed(gqa_values(), "sample_from_anchor", False))
    assert (config.block_size, config.num_trained_drafts) == (5, 4)


def test_rope_interleave_is_refused_unless_overridden(values):
    expected = parse_draft_config(values)
    values["rope_interleave"] = True
    assert "rope_interleaved" in refusal(values)
    for is_interleaved in (True, False):
        config = parse_draft_config(values, DraftOverrides(rope_interleaved=is_interleaved))
        assert config == replace(expected, rope=replace(expected.rope, is_interleaved=is_interleaved))


def test_the_theta_of_rope_parameters_wins_and_can_be_overridden(values):
    values["rope_theta"] = 7.0
    assert parse_draft_config(values).rope.theta == 50000.0
    assert parse_draft_config(values, DraftOverrides(rope_theta=10000.0)).rope.theta == 10000.0
    del values["rope_parameters"]["rope_theta"]
    assert parse_draft_config(values).rope.theta == 7.0
    del values["rope_parameters"]
    assert parse_draft_config(values).rope.factor == 1.0


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model_type", "llama", '"k3_dspark" or "qwen3"'),
        ("architectures", ["LlamaForCausalLM"], "architectures"),
        ("hidden_act", "situ", '"silu"'),
        ("markov_head_type", "gated", "markov_head_type"),
        ("markov_rank", 0, "at least 1"),
        ("mask_token_id", 512, "below vocab_size, 512"),
        ("target_layer_ids", [2, 3, 7], "from 0 to 6"),
        ("target_layer_ids", [3, 2, 6], "ascending"),
        ("target_layer_ids", [2, 2, 6], "ascending"),
        ("target_layer_ids", [], "ascending"),
        ("block_size", 1, "at least 2"),
        ("rope_parameters.rope_type", "llama3", '"yarn" or "default"'),
        ("rope_parameters.factor", 0.5, "at least 1"),
        ("rope_parameters.attention_factor", 1.0, "not a known key"),
        ("rope_scaling", {"rope_type": "yarn"}, "absent"),
        ("quantization_config", {}, "not a known key"),
        ("d2t", True, "not a known key"),
    ],
)
def test_a_wrong_value_names_key_found_and_allowed(values, path, value, expected):
    if path in values.get("dflash_config", {}):
        path = f"dflash_config.{path}"
    message = refusal(changed(values, path, value))
    assert path.rpartition(".")[2] in message
    assert expected in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mla_use_output_gate", True),
        ("mla_use_nope", True),
        ("num_target_layers", 4),
        ("target_hidden_size", 128),
        ("draft_vocab_size", 256),
        ("num_key_value_heads", 1),
        ("qk_rope_head_dim", 15),
    ],
)
def test_what_a_latent_draft_cannot_be(path, value):
    assert path in refusal(changed(mla_values(), path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("attention_bias", True),
        ("sliding_window", 128),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("num_key_value_heads", 3),
        ("head_dim", 31),
        ("dflash_config.attention_mode", "mla"),
        ("dflash_config.projector_type", "domino"),
    ],
)
def test_what_a_grouped_query_draft_cannot_be(path, value):
    assert path in refusal(changed(gqa_values(), path, value))


def test_a_key_that_differs_between_its_two_places_is_refused():
    assert "must agree" in refusal(changed(gqa_values(), "markov_rank", 8))


def test_an_unknown_key_is_refused_in_every_section(values):
    for section in ("", "dflash_config.", "rope_parameters."):
        assert "surprise" in refusal(changed(values, f"{section}surprise", 1))


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 128), ("vocab_size", 768), ("num_hidden_layers", 9)])
def test_a_draft_of_another_target_is_refused_naming_both(values, micro_checkpoint, key, value):
    target = replace(load_model_config(micro_checkpoint), hidden_size=64, vocab_size=512, num_hidden_layers=8)
    draft = parse_draft_config(values)
    check_fit(draft, target, 5)
    with pytest.raises(ConfigError, match=rf"(?s){getattr(target, key)}.*{key} is {value}"):
        check_fit(draft, replace(target, **{key: value}), 5)


def test_another_number_of_drafts_than_trained_is_refused(micro_checkpoint):
    target = replace(load_model_config(micro_checkpoint), hidden_size=64, vocab_size=512, num_hidden_layers=8)
    with pytest.raises(ConfigError, match=r"num_drafts is 7 and the draft's block_size 5 .* set num_drafts to 5"):
        check_fit(parse_draft_config(gqa_values()), target, 7)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_draft_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_draft_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    with pytest.raises(ConfigError, match=r"config\.json: model_type"):
        load_draft_config(tmp_path)
