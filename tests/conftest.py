"""Where tests find checkpoints with known answers."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from perilune import env
from perilune.config.model import ModelConfig
from perilune.config.presets import preset_config

# the tensors of tests are tiny: sharing them among threads costs more than it saves, most of all on a busy machine
torch.set_num_threads(1)

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def goldens_dir() -> Path:
    """The directory of larger golden checkpoints, which not every clone has; the test is skipped without it."""
    directory = TESTS.parent / env.goldens()
    if not directory.is_dir():
        pytest.skip(f"no golden checkpoints at {directory}: set PERILUNE_GOLDENS to their directory")
    return directory


@pytest.fixture(scope="session")
def fixtures_dir(goldens_dir: Path) -> Path:
    """Released configurations, beside the golden checkpoints."""
    return _beside(goldens_dir, "fixtures")


@pytest.fixture(scope="session")
def shared_data_dir(goldens_dir: Path) -> Path:
    """The released rank file and prompt vectors, beside the golden checkpoints."""
    return _beside(goldens_dir, "data")


def _beside(goldens_dir: Path, name: str) -> Path:
    directory = goldens_dir.parent / name
    if not directory.is_dir():
        pytest.skip(f"no {name} at {directory}: it is looked for beside PERILUNE_GOLDENS")
    return directory


@pytest.fixture(scope="session")
def released_configs() -> dict[str, ModelConfig]:
    """The two released configurations by architecture; a test compares them with the released files."""
    sizes = {"vocab_size": 163840, "intermediate_size": 33792, "num_hidden_layers": 93, "num_experts": 896}
    return {arch: preset_config("k3-slice", arch, has_vision=True, sizes=sizes) for arch in ("k3", "k31")}


@pytest.fixture(scope="session")
def micro_checkpoint() -> Path:
    """The small golden checkpoint that every clone carries."""
    return TESTS / "goldens" / "k31-micro"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """What a test makes of the process's log lines ends with it: its stderr may be closed by then."""
    loggers = [logging.getLogger(), logging.getLogger("perilune")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
