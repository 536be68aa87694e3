from itertools import combinations

import pytest
import torch

from perilune import ops
from perilune.speculative.drawn import DrawnDrafts, Purpose, numbers
from perilune.speculative.verify import accept_block, accept_tokens, law_of

SETTINGS = [(1.0, 0.0, 1.0, 0.0), (0.5, 3.0, 1.0, 0.0), (1.5, 0.0, 0.7, 0.0), (0.0, 0.0, 1.0, 0.0)]


def rows_of_logits(seed, vocab=11):
    return 2 * torch.randn(len(SETTINGS), vocab, generator=torch.Generator().manual_seed(seed))


def test_each_draft_is_what_its_law_and_number_say():
    draws = [numbers(seed, 40, Purpose.DRAW, 3) for seed in range(len(SETTINGS))]
    drawn = DrawnDrafts(SETTINGS, draws)
    for index in range(3):
        logits = rows_of_logits(index)
        token_ids = drawn.choose(index, logits)
        rows = torch.tensor([(*own, draw[index]) for own, draw in zip(SETTINGS, draws, strict=True)])
        assert torch.equal(token_ids, ops.sample_tokens(logits, rows.double(), None)[0])
    laws = drawn.laws
    assert laws.shape == (len(SETTINGS), 3, 11)
    assert torch.allclose(laws.sum(-1), torch.ones(len(SETTINGS), 3, dtype=torch.float64))
    assert torch.allclose(laws[0, 0], rows_of_logits(0)[0].double().softmax(-1), atol=1e-6)
    assert (laws[1] > 0).sum(-1).tolist() == [3, 3, 3]
    assert (laws[3] > 0).sum(-1).tolist() == [1, 1, 1]


def test_numbers_differ_by_seed_round_purpose_and_place_and_are_the_same_again():
    found = [
        (seed, start, purpose, place, number)
        for seed in (-1, 0, 7)
        for start in (5, 6)
        for purpose in Purpose
        for place, number in enumerate(numbers(seed, start, purpose, 4))
    ]
    assert all(a[-1] != b[-1] for a, b in combinations(found, 2))
    assert all(0 <= entry[-1] < 1 for entry in found)
    assert numbers(7, 5, Purpose.JUDGE, 4) == numbers(7, 5, Purpose.JUDGE, 4)
    # more drafts do not change the numbers of the first ones
    assert numbers(7, 5, Purpose.DRAW, 2) == numbers(7, 5, Purpose.DRAW, 4)[:2]


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_what_a_masked_target_forbids_is_not_kept(rule):
    """The target's law has a mask that the draft knew nothing of."""
    logits, mask = rows_of_logits(3), torch.tensor([[0b1010]] * 2, dtype=torch.int32)
    rows = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.5]] * 2, dtype=torch.float64)
    target = law_of(ops.sample_masses(logits[:2], rows, mask)[2])
    for seed in range(200):
        drawn = DrawnDrafts(SETTINGS[:1], [numbers(seed, 0, Purpose.DRAW, 1)])
        draft_id = int(drawn.choose(0, logits[:1]))
        verdict = rule(target, drawn.laws[0], [draft_id], numbers(seed, 0, Purpose.JUDGE, 2))
        assert verdict.token_id in (1, 3)
        assert verdict.num_accepted == 0 or draft_id in (1, 3)
