import pytest

from perilune.text.tokenizer import Tokenizer
from train.dictionary import DATA_DIR


@pytest.fixture(scope="session")
def grown() -> Tokenizer:
    """The vocabulary that the stages train with."""
    return Tokenizer.load(DATA_DIR)
