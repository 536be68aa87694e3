import pytest
import torch

from perilune.text.rank_file import read_rank_file
from perilune.text.tokenizer import RANK_FILE, Tokenizer
from train.dictionary import DATA_DIR
from train.skills.growth import NUM_NEW_RANKS, grow_ranks, grow_state, new_texts


def test_the_grown_ranks_begin_with_those_that_the_demo_knows(ranks: dict[bytes, int]):
    grown = read_rank_file(DATA_DIR / RANK_FILE)
    assert len(grown) == len(ranks) + NUM_NEW_RANKS
    assert {token: rank for token, rank in grown.items() if rank < len(ranks)} == ranks


def test_ranks_grow_by_what_is_frequent_in_the_texts(ranks: dict[bytes, int]):
    grown = grow_ranks(ranks, {"zebraic": 3}, 1)
    before, after = Tokenizer.from_ranks(ranks), Tokenizer.from_ranks(grown)
    assert list(grown)[-1] in b"zebraic"
    assert len(after.encode("zebraic")) == len(before.encode("zebraic")) - 1
    assert after.decode(after.encode("zebraic")) == "zebraic"


def test_texts_of_tools_become_shorter(tokenizer: Tokenizer, grown: Tokenizer):
    text = next(text for text in new_texts(1, 99) if len(text) > 300)
    assert len(grown.encode(text)) < 0.6 * len(tokenizer.encode(text))
    assert grown.decode(grown.encode(text)) == text


def test_a_new_token_starts_as_the_mean_of_its_parts_and_special_ones_keep_their_rows(
    tokenizer: Tokenizer, grown: Tokenizer
):
    rows = torch.randn(tokenizer.vocab_size, 4)
    state = {"model.embed_tokens.weight": rows, "lm_head.weight": rows, "other": torch.ones(1)}
    found = grow_state(state, tokenizer, grown)["lm_head.weight"]
    assert found.shape == (grown.vocab_size, 4)
    torch.testing.assert_close(found[: tokenizer.num_ranks], rows[: tokenizer.num_ranks])
    torch.testing.assert_close(found[grown.num_ranks :], rows[tokenizer.num_ranks :])
    new = tokenizer.num_ranks + 3
    parts = tokenizer.encode(grown.token_bytes(new).decode())
    assert found[new].tolist() == pytest.approx(rows[parts].mean(0).tolist(), abs=1e-6)
