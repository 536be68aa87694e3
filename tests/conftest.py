"""Where tests find checkpoints with known answers."""

from pathlib import Path

import pytest

from perilune import env

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def goldens_dir() -> Path:
    """The directory of larger golden checkpoints, which not every clone has; the test is skipped without it."""
    directory = TESTS.parent / env.goldens()
    if not directory.is_dir():
        pytest.skip(f"no golden checkpoints at {directory}: set PERILUNE_GOLDENS to their directory")
    return directory


@pytest.fixture(scope="session")
def micro_checkpoint() -> Path:
    """The small golden checkpoint that every clone carries."""
    return TESTS / "goldens" / "k31-micro"
