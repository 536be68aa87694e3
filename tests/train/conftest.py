from pathlib import Path

import pytest

import perilune
from perilune.text.rank_file import read_rank_file
from perilune.text.tokenizer import RANK_FILE, Tokenizer


@pytest.fixture(scope="session")
def ranks() -> dict[bytes, int]:
    return read_rank_file(Path(perilune.__file__).parent / "demo" / RANK_FILE)


@pytest.fixture(scope="session")
def tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    return Tokenizer.from_ranks(ranks)
