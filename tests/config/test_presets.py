import pytest

from perilune.config.parse import load_model_config
from perilune.config.presets import preset_config
from perilune.errors import ConfigError
from perilune.models.accounting import account


def test_the_slice_has_the_real_widths_and_the_promised_size():
    config = preset_config("k3-slice", "k3", has_vision=False, sizes={})
    assert (config.hidden_size, config.kda.num_heads, config.mla.num_heads) == (7168, 96, 96)
    assert (config.moe.routed_expert_hidden_size, config.moe.moe_intermediate_size) == (3584, 3072)
    assert (len(config.kda_layers), config.full_attn_layers) == (3, (3,))
    assert account(config).total_size == 7_580_162_624


def test_the_slice_at_full_size_is_the_released_model(fixtures_dir, released_configs):
    assert released_configs["k3"] == load_model_config(fixtures_dir / "kimi-k3")
    assert released_configs["k31"] == load_model_config(fixtures_dir / "kimi-k3.1-pro")


def test_control_ids_follow_the_ranks():
    config = preset_config("tiny", "k31", has_vision=True, sizes={"vocab_size": 1000})
    ids = (config.bos_token_id, config.eos_token_id, config.media_placeholder_token_id, config.pad_token_id)
    assert ids == (744, 746, 765, 999)


def test_sizes_reach_both_kinds_of_attention_and_the_experts():
    sizes = {"num_attention_heads": 2, "num_experts": 8, "hidden_size": 64, "num_hidden_layers": 6}
    config = preset_config("tiny", "k31", has_vision=True, sizes=sizes)
    assert (config.kda.num_heads, config.mla.num_heads, config.moe.num_experts) == (2, 2, 8)
    assert config.full_attn_layers == (3, 5)
    assert config.vision is not None
    assert config.vision.text_hidden_size == 64


def test_sizes_that_do_not_fit_are_refused_by_their_key():
    with pytest.raises(ConfigError, match=r"num_experts_per_token is 4; allowed: at most num_experts, 2"):
        preset_config("tiny", "k3", has_vision=False, sizes={"num_experts": 2})
    with pytest.raises(ConfigError, match=r"moe_intermediate_size is 100; allowed: a multiple of 32"):
        preset_config("tiny", "k3", has_vision=False, sizes={"moe_intermediate_size": 100})
