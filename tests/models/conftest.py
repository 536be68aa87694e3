import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.config.model import NormEps
from perilune.config.parse import load_model_config
from perilune.models.model import build_model


@pytest.fixture(scope="session")
def config(micro_checkpoint):
    return load_model_config(micro_checkpoint)


@pytest.fixture(scope="session")
def state(micro_checkpoint, config):
    return load_state(micro_checkpoint, config)


@pytest.fixture(scope="session")
def model(config, state):
    return build_model(config, state, NormEps(), torch.float32)
