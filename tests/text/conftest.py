"""A small byte-level vocabulary for most tests, and the released one where its file is at hand."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from perilune.text.tokenizer import RANK_FILE, Tokenizer

WORDS = ("message", "think", "response", "tools", " role", '="', "user", "system", "assistant", "你好", "hello", "  ")


def small_ranks(words: Iterable[str] = WORDS) -> dict[bytes, int]:
    """256 single bytes, then every prefix of the words."""
    ranks = {bytes([value]): value for value in range(256)}
    for word in words:
        raw = word.encode()
        for end in range(2, len(raw) + 1):
            ranks.setdefault(raw[:end], len(ranks))
    return ranks


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_ranks(small_ranks())


@pytest.fixture(scope="session")
def kimi_tokenizer(shared_data_dir: Path) -> Tokenizer:
    directory = shared_data_dir / "kimi-tokenizer"
    if not (directory / RANK_FILE).exists():
        pytest.skip(f"the released tokenizer file is absent: {directory / RANK_FILE}")
    return Tokenizer.load(directory)
