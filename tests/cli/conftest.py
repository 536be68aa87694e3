"""A checkpoint small enough to be answered from at once, and the server that the tests of `server` use."""

from pathlib import Path

import pytest

from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.presets import preset_config
from perilune.text.rank_file import read_rank_file
from perilune.text.special import NUM_SPECIAL_SLOTS
from tests.server.conftest import serve, tokenizer  # noqa: F401 - fixtures

RANK_FILE = Path(__file__).parents[2] / "perilune" / "demo" / "tiktoken.model"
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """Random weights with the demo's vocabulary."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    vocab_size = len(read_rank_file(RANK_FILE)) + NUM_SPECIAL_SLOTS
    config = preset_config("tiny", "k31", has_vision=False, sizes={**SIZES, "vocab_size": vocab_size})
    write_random_checkpoint(directory, config, seed=1)
    return directory
