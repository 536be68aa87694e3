"""Decides what is kept out of training, by what it is and not by chance, so that every run agrees."""

import hashlib

# Smaller seeds are for training.
FIRST_EVALUATION_SEED = 1_000_000


def is_chosen(text: str, one_in: int) -> bool:
    """True for about one text in `one_in`, always the same ones."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % one_in == 0
