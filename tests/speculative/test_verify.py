"""Every rule against the target's own law, over all sequences of three tokens of a vocabulary of three.

A table of logits for every prefix stands for the two models. Laws are computed as the engine computes them, through
temperature and filters; rounds of drafting and verifying go on until three tokens are there. Seeds are fixed, so that
a test passes or fails for good.
"""

import random
from functools import cache
from itertools import product
from math import sqrt

import pytest
import torch

from perilune import ops
from perilune.speculative.verify import Verdict, accept_block, accept_matching, accept_tokens, law_of

VOCAB, LENGTH, NUM_DRAFTS, NUM_SAMPLES = 3, 3, 3, 3000
PREFIXES = [prefix for length in range(LENGTH + NUM_DRAFTS + 1) for prefix in product(range(VOCAB), repeat=length)]
# temperature, top-k, top-p, min-p
SETTINGS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (2.5, 0, 1.0, 0.0),
    "cold": (0.4, 0, 1.0, 0.0),
    "top-k": (1.0, 2, 1.0, 0.0),
    "top-p": (0.8, 0, 0.8, 0.0),
    "min-p": (1.3, 0, 1.0, 0.3),
}


def laws(seed, settings):
    """Prefix -> probabilities [V] of the next token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(len(PREFIXES), VOCAB, generator=generator)
    rows = torch.tensor([(*settings, 0.0)] * len(PREFIXES), dtype=torch.float64)
    return dict(zip(PREFIXES, law_of(ops.sample_masses(logits, rows, None)[2]), strict=True))


@cache
def models_of(name):
    """The target and a draft that differs from it."""
    return laws(1, SETTINGS[name]), laws(2, SETTINGS[name])


@pytest.fixture(params=sorted(SETTINGS))
def name(request):
    return request.param


def draw(law, uniform):
    return int((law.cumsum(0) <= uniform * float(law.sum())).sum())


def round_of(rule, target, draft, prefix, source):
    """One round after `prefix`: what it emits."""
    drafts, rows = [], []
    for _ in range(NUM_DRAFTS):
        rows.append(draft[(*prefix, *drafts)])
        drafts.append(draw(rows[-1], source.random()))
    judged = torch.stack([target[(*prefix, *drafts[:index])] for index in range(NUM_DRAFTS + 1)])
    verdict = rule(judged, torch.stack(rows), drafts, [source.random() for _ in range(NUM_DRAFTS + 1)])
    return (*drafts[: verdict.num_accepted], verdict.token_id), verdict.num_accepted


@cache
def sampled(rule, name):
    """Sequences of three tokens by the two models, and how many drafts stayed in the first rounds."""
    return run(rule, *models_of(name))


def run(rule, *models):
    source, found, accepted = random.Random(0), [], 0
    for _ in range(NUM_SAMPLES):
        tokens, first = round_of(rule, *models, (), source)
        accepted += first
        while len(tokens) < LENGTH:
            tokens += round_of(rule, *models, tokens, source)[0]
        found.append(tokens[:LENGTH])
    return found, accepted / NUM_SAMPLES


def chi_squared_excess(found, target):
    """How many standard deviations the statistic lies above its expectation (Wilson and Hilferty)."""
    statistic, cells = 0.0, -1
    for tokens in product(range(VOCAB), repeat=LENGTH):
        expected = float(len(found))
        for index, token in enumerate(tokens):
            expected *= float(target[tokens[:index]][token])
        count = found.count(tokens)
        if expected == 0:
            assert count == 0, f"{tokens} cannot be"
            continue
        statistic, cells = statistic + (count - expected) ** 2 / expected, cells + 1
    if cells == 0:
        return 0.0
    spread = 2 / (9 * cells)
    return ((statistic / cells) ** (1 / 3) - (1 - spread)) / sqrt(spread)


def matching(target, draft, draft_ids, uniforms):
    """Drafts that were chosen, not drawn: plain sampling of every row decides."""
    return accept_matching([draw(law, uniform) for law, uniform in zip(target, uniforms, strict=True)], draft_ids)


def point_masses(draft):
    """A draft model that proposes its best token."""
    return {prefix: torch.nn.functional.one_hot(law.argmax(), VOCAB).double() for prefix, law in draft.items()}


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_drawn_drafts_leave_the_law_of_the_target(name, rule):
    found, _ = sampled(rule, name)
    assert chi_squared_excess(found, models_of(name)[0]) < 4


@pytest.mark.parametrize("rule", [accept_tokens, accept_block, matching])
def test_certain_drafts_leave_the_law_of_the_target(name, rule):
    target, draft = models_of(name)
    found, _ = run(rule, target, point_masses(draft))
    assert chi_squared_excess(found, target) < 4


def drawn_from_the_whole_law(target, draft, draft_ids, uniforms):
    """Wrong: a rejected draft may come again."""
    verdict = accept_tokens(target, draft, draft_ids, uniforms)
    return Verdict(verdict.num_accepted, draw(target[verdict.num_accepted], uniforms[-1]))


def kept_by_the_target_alone(target, draft, draft_ids, uniforms):
    """Wrong: keeps a draft with its probability under the target, whatever it was drawn from."""
    return accept_tokens(target, torch.ones_like(draft), draft_ids, uniforms)


def judged_one_row_late(target, draft, draft_ids, uniforms):
    """Wrong: the law after the draft instead of the one before it."""
    return accept_tokens(torch.cat((target[1:], target[-1:])), draft, draft_ids, uniforms)


def block_that_passes_by_its_ratio(target, draft, draft_ids, uniforms):
    """Wrong: a prefix passes with r_i, as if it were the whole block."""
    reached, kept, share = 1.0, 0, 1.0
    for index, draft_id in enumerate(draft_ids):
        reached = min(1.0, reached * float(target[index, draft_id] / draft[index, draft_id]))
        if uniforms[index] < reached:
            kept, share = index + 1, reached
    left = (share * target[kept] - draft[kept]).clamp(min=0) if kept < NUM_DRAFTS else target[kept]
    return Verdict(kept, draw(left if left.sum() > 0 else target[kept], uniforms[-1]))


@pytest.mark.parametrize(
    "rule", [drawn_from_the_whole_law, kept_by_the_target_alone, judged_one_row_late, block_that_passes_by_its_ratio]
)
def test_a_wrong_rule_is_found(rule):
    found, _ = sampled(rule, "plain")
    assert chi_squared_excess(found, models_of("plain")[0]) > 6


def test_a_block_keeps_no_fewer_drafts_than_token_by_token(name):
    (_, single), (_, block) = (sampled(rule, name) for rule in (accept_tokens, accept_block))
    assert block > single - 0.02


def test_a_block_keeps_more_where_the_models_differ():
    (_, single), (_, block) = (sampled(rule, "plain") for rule in (accept_tokens, accept_block))
    assert block > single + 0.02


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_a_draft_that_is_the_target_is_always_kept(rule):
    target, _ = models_of("plain")
    _, accepted = run(rule, target, target)
    assert accepted == NUM_DRAFTS


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
def test_a_token_that_the_target_forbids_never_comes_out(rule):
    target = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.3, 0.7, 0.0]], dtype=torch.float64)
    draft = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.0, 0.5]], dtype=torch.float64)
    source = random.Random(0)
    for _ in range(500):
        drafts = [draw(law, source.random()) for law in draft]
        verdict = rule(target, draft, drafts, [source.random() for _ in range(3)])
        emitted = [*drafts[: verdict.num_accepted], verdict.token_id]
        assert all(target[index, token] > 0 for index, token in enumerate(emitted))


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_draw_are_tokens_with_weight(rule, uniform):
    target = torch.tensor([[0.0, 0.25, 0.75, 0.0]] * 2, dtype=torch.float64)
    draft = torch.tensor([[0.5, 0.0, 0.0, 0.5]], dtype=torch.float64)
    verdict = rule(target, draft, [0], [0.5, uniform])
    assert verdict == Verdict(0, 1 if uniform == 0 else 2)


def test_matching_takes_drafts_up_to_the_first_other_token():
    assert accept_matching([4, 5, 6], [4, 5]) == Verdict(2, 6)
    assert accept_matching([4, 7, 6], [4, 5]) == Verdict(1, 7)
    assert accept_matching([3, 5, 6], [4, 5]) == Verdict(0, 3)
    assert accept_matching([3], []) == Verdict(0, 3)


def test_no_drafts_draw_from_the_target():
    target = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    for rule in (accept_tokens, accept_block):
        assert rule(target, torch.empty(0, 3, dtype=torch.float64), [], [0.5]) == Verdict(0, 1)
