"""Every golden case of the three published-shape drafts, through the paged cache that the target fills."""

import numpy as np
import pytest
import torch

from perilune.cache.storage import CacheStorage
from perilune.checkpoint.draft import load_draft_state
from perilune.checkpoint.loader import load_state
from perilune.config.draft import load_draft_config
from perilune.config.model import NormEps
from perilune.config.parse import load_model_config
from perilune.models.draft.block import DRAFT_GROUP
from perilune.models.draft.model import build_draft
from perilune.models.draft.tapped import TappedModel
from perilune.models.model import build_model
from tests.models.passes import BLOCK_SIZE, pass_over

DRAFTS = ("mla", "mla_causal", "gqa")
CONTEXTS = ("ctx8", "ctx40", "ctx63")
LIMIT = 1e-4
NUM_DRAFTS = 7
# blocks of the sequence under test, out of order; the rest of the pool holds NaN
TABLE = [9, 2, 21, 0, 14, 5, 18, 7, 11, 3, 23, 16, 6, 12, 19, 8, 1, 20, 10, 4]
SLOT = 2


@pytest.fixture(scope="module")
def target(goldens_dir):
    directory = goldens_dir / "k31-tiny"
    config = load_model_config(directory)
    return build_model(config, load_state(directory, config), NormEps(), torch.float32)


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request, goldens_dir, target):
    directory = goldens_dir / "dspark-tiny" / request.param
    config = load_draft_config(directory)
    state = load_draft_state(directory, config)
    return build_draft(config, state, target.model.embed_tokens, target.lm_head, torch.float32)


@pytest.fixture
def golden(draft, goldens_dir):
    kind = "gqa" if not draft.config.is_latent else "mla_causal" if draft.config.is_causal else "mla"

    def load(name):
        with np.load(goldens_dir / "dspark-tiny" / kind / f"{name}.npz") as file:
            return {key: torch.from_numpy(file[key]) for key in file}

    return load


@pytest.fixture
def cache(target, draft):
    groups = TappedModel(target, draft).cache_groups()
    storage = CacheStorage(groups, num_blocks=24, block_size=BLOCK_SIZE, num_slots=4, dtype="float32")
    for view in storage.views.values():
        view.fill_(torch.nan)
    storage.zero_slots([SLOT])
    return storage.views


def worst(expected, found):
    """The largest relative error of a row."""
    expected, found = expected.double().flatten(0, -2), found.double().flatten(0, -2)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def run_block(draft, cache, anchor, num_before):
    """One draft pass -> hidden states, the drafts, and the corrected logits."""
    blocks = draft.blocks(
        torch.tensor([anchor]), torch.tensor([num_before]), torch.tensor([TABLE]), cache, num_drafts=NUM_DRAFTS
    )
    hidden, seen = draft(blocks), []

    def choose(_, logits_NV):
        seen.append(logits_NV)
        return logits_NV.argmax(-1)

    drafts = draft.draft(hidden, torch.tensor([anchor]), NUM_DRAFTS, choose)
    greedy = draft.draft(hidden, torch.tensor([anchor]), NUM_DRAFTS)
    assert torch.equal(drafts.token_ids, greedy.token_ids)
    return hidden, drafts, torch.stack(seen, 1)[0]


def cached_rows(cache, num_rows):
    """The draft's rows of the sequence, [layers, num_rows, W]."""
    return cache[DRAFT_GROUP][:, TABLE].flatten(1, 2)[:, :num_rows]


def check_block(draft, cache, expected, prefix=""):
    case = {key.removeprefix(prefix): value for key, value in expected.items() if key.startswith(prefix)}
    num_before = int(case["anchor_position"])
    hidden, drafts, logits = run_block(draft, cache, int(case["anchor_id"]), num_before)
    assert worst(case["hidden"], hidden) <= LIMIT
    assert worst(case["base_logits"], drafts.base_KNV[:, 0]) <= LIMIT
    assert worst(case["logits"], logits) <= LIMIT
    assert drafts.token_ids[0].tolist() == case["draft_ids"].tolist()
    assert worst(case["kv_rows"], cached_rows(cache, num_before + NUM_DRAFTS)) <= LIMIT
    if draft.config.has_confidence_head:
        assert float((case["confidence_logits"] - draft.confidence_logits(drafts)[0]).abs().max()) <= LIMIT
    else:
        assert draft.confidence_logits(drafts) is None
    return drafts.token_ids[0].tolist()


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_block_from_stored_taps_is_that_of_the_golden(draft, golden, cache, name):
    case = golden(name)
    taps = case["taps"].flatten(1)
    assert worst(case["context"], draft.context(taps)) <= LIMIT
    draft.write_context(taps, pass_over([(case["token_ids"].tolist(), 0, TABLE, SLOT)], cache))
    check_block(draft, cache, case)


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("chunk", [5, 63])
def test_the_target_leaves_these_context_rows_itself_in_any_chunks(target, draft, golden, cache, name, chunk):
    case, model = golden(name), TappedModel(target, draft)
    token_ids = case["token_ids"].tolist()
    for start in range(0, len(token_ids), chunk):
        model(pass_over([(token_ids[start : start + chunk], start, TABLE, SLOT)], cache))
    check_block(draft, cache, case)


def test_two_rounds_of_drafting_verification_and_drafting(target, draft, golden, cache):
    case, model = golden("rounds"), TappedModel(target, draft)
    token_ids = case["token_ids"].tolist()
    model(pass_over([(token_ids, 0, TABLE, SLOT)], cache))
    states = [group.name for group in model.cache_groups() if group.kind == "state"]
    known, emitted = list(token_ids), []
    for number in ("r1_", "r2_"):
        anchor = int(case[f"{number}anchor_id"])
        drafted = check_block(draft, cache, case, number)
        row_ids = [anchor, *drafted]
        assert row_ids == case[f"{number}verify_ids"].tolist()
        before = {name: view[:, SLOT].clone() for name, view in cache.items() if name in states}
        logits = model(pass_over([(row_ids, len(known), TABLE, SLOT)], cache))
        assert worst(case[f"{number}verify_logits"], logits) <= LIMIT
        best = logits.argmax(-1).tolist()
        accepted = next((i for i, pair in enumerate(zip(drafted, best, strict=False)) if pair[0] != pair[1]), 7)
        assert accepted == int(case[f"{number}accepted"])
        emitted = [*drafted[:accepted], best[accepted]]
        assert emitted == case[f"{number}emitted"].tolist()
        # the state goes back and takes the accepted tokens alone; draft rows stay as the verify pass left them
        for name, own in before.items():
            cache[name][:, SLOT] = own
        rows = cache[DRAFT_GROUP].clone()
        target(pass_over([(row_ids[: accepted + 1], len(known), TABLE, SLOT)], cache))
        cache[DRAFT_GROUP].copy_(rows)
        known += row_ids[: accepted + 1]
    assert (
        worst(case["r2_context"], draft.context(torch.cat((case["taps"], case["r1_verify_taps"]))[:40].flatten(1)))
        <= LIMIT
    )
