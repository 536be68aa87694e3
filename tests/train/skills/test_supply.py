from itertools import islice

import pytest
import torch

from perilune.text.special import MEDIA_PAD
from perilune.text.tokenizer import Tokenizer
from train.skills.supply import BATCH_TOKENS, KINDS, Batches, held_out_dialogues


def test_equal_seeds_give_equal_batches(grown: Tokenizer):
    shares = {"chat": 1.0, "tools": 1.0, "json": 1.0, "talk": 1.0}
    first, second = (list(islice(Batches(3, grown, shares), 5)) for _ in range(2))
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))


def test_every_kind_fills_a_step_and_has_something_to_learn(grown: Tokenizer):
    batches = Batches(3, grown, {"chat": 1.0})
    for name in (*KINDS, "chat"):
        batch = batches.batch(name)
        assert batch.token_ids.numel() in (BATCH_TOKENS, KINDS[name].length if name in KINDS else 0)
        assert batch.loss_mask.any(dim=1).all()


def test_pictures_stand_where_their_tokens_are(grown: Tokenizer):
    batch = Batches(3, grown, {}).batch("pictures")
    pads = (batch.token_ids.flatten() == grown.special_ids[MEDIA_PAD]).nonzero().squeeze(1)
    assert batch.image_rows is not None
    assert batch.patches is not None
    assert torch.equal(batch.image_rows.sort().values, pads)
    assert sum(rows * columns for _, rows, columns in batch.grids) == batch.patches.shape[0] == 4 * len(pads)


def test_seeds_of_training_are_refused_for_held_out_questions(grown: Tokenizer):
    with pytest.raises(ValueError, match="seed 5 belongs to training"):
        held_out_dialogues("json", 1, 5, grown)
