"""Small models whose sizes divide, and one that leaves remainders."""

import pytest

from perilune.config.model import ModelConfig
from perilune.config.presets import preset_config


@pytest.fixture(scope="session")
def small() -> ModelConfig:
    sizes = {"num_hidden_layers": 9, "num_experts": 24, "vocab_size": 515, "num_attention_heads": 4}
    return preset_config("tiny", "k31", has_vision=True, sizes=sizes)


@pytest.fixture
def k3(released_configs) -> ModelConfig:
    return released_configs["k3"]


@pytest.fixture
def k31(released_configs) -> ModelConfig:
    return released_configs["k31"]
