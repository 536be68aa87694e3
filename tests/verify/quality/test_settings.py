from pathlib import Path

import pytest

from perilune.config.engine import DEMO_CHECKPOINT
from perilune.errors import ConfigError
from perilune.verify.quality.settings import BASELINE, SETTINGS, Setting, chosen_settings


def test_only_a_setting_that_asks_twice_has_a_prefix_cache():
    assert "--no-prefix-cache" in Setting("x").arguments
    assert "--no-prefix-cache" not in Setting("x", is_asked_twice=True).arguments


def test_the_dtype_is_bfloat16_unless_the_setting_names_one():
    assert Setting("x").arguments.count("--dtype") == 1
    assert "bfloat16" in Setting("x").arguments
    assert "bfloat16" not in Setting("x", ("--dtype", "float32")).arguments


def test_the_baseline_comes_first_and_names_are_checked():
    assert [s.name for s in chosen_settings(["streaming", "batch 32"], DEMO_CHECKPOINT)] == [
        BASELINE,
        "batch 32",
        "streaming",
    ]
    with pytest.raises(ConfigError, match="--setting is 'fast'; allowed are bf16, batch 1; batch 32"):
        chosen_settings(["fast"], DEMO_CHECKPOINT)


def test_a_checkpoint_without_a_draft_is_not_asked_with_one(tmp_path: Path):
    assert {s.name for s in SETTINGS} - {s.name for s in chosen_settings([], tmp_path)} == {"speculative dspark"}
    assert chosen_settings([], DEMO_CHECKPOINT) == list(SETTINGS)
