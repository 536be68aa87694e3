"""A checkpoint with random weights, small enough to load in every test."""

from pathlib import Path

import pytest

from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.presets import preset_config


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "random"
    write_random_checkpoint(
        directory, preset_config("tiny", "k31", has_vision=False, sizes={"vocab_size": 640}), seed=1
    )
    return directory
