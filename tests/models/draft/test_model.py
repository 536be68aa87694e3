"""Draft models on the small checkpoint that every clone carries."""

import gc
from dataclasses import replace

import pytest
import torch

from perilune.cache.storage import CacheStorage
from perilune.checkpoint.draft import load_draft_state
from perilune.config.draft import load_draft_config
from perilune.errors import CheckpointError
from perilune.models.draft.block import DRAFT_GROUP
from perilune.models.draft.model import build_draft
from perilune.models.draft.tapped import TappedModel
from perilune.ops import _native
from perilune.ops.recording import Arena, record, replay
from tests.drafts import gqa_values, mla_values, write_draft
from tests.models.passes import BLOCK_SIZE, pass_over

TARGET = {"hidden": 32, "vocab": 160, "layers": 4, "taps": (0, 2)}
SHAPES = {"mla": mla_values, "gqa": gqa_values}
TOKENS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
TABLE, OTHER = [5, 1, 8, 3, 10], [2, 9, 4, 7, 0]
NUM_DRAFTS = 5


@pytest.fixture(scope="module", params=[(shape, causal) for shape in SHAPES for causal in (False, True)], ids=str)
def directory(request, tmp_path_factory):
    shape, is_causal = request.param
    path = tmp_path_factory.mktemp("draft")
    write_draft(path, SHAPES[shape](**TARGET) | {"is_causal": is_causal})
    return path


@pytest.fixture(scope="module")
def draft(directory, model):
    config = load_draft_config(directory)
    state = load_draft_state(directory, config)
    return build_draft(config, state, model.model.embed_tokens, model.lm_head, torch.float32)


@pytest.fixture
def tapped(model, draft):
    return TappedModel(model, draft)


def new_cache(tapped, fill=torch.nan):
    storage = CacheStorage(tapped.cache_groups(), num_blocks=12, block_size=BLOCK_SIZE, num_slots=4, dtype="float32")
    for view in storage.views.values():
        view.fill_(fill)
    storage.zero_slots([0, 1])
    return storage.views


def drafts_after(draft, cache, anchors, counts, tables):
    blocks = draft.blocks(
        torch.tensor(anchors), torch.tensor(counts), torch.tensor(tables), cache, num_drafts=NUM_DRAFTS
    )
    return draft.draft(draft(blocks), torch.tensor(anchors), NUM_DRAFTS)


def test_tapping_changes_no_logit(model, tapped):
    plain, watched = new_cache(tapped), new_cache(tapped)
    logits = tapped(pass_over([(TOKENS, 0, TABLE, 0)], watched))
    assert torch.equal(logits, model(pass_over([(TOKENS, 0, TABLE, 0)], plain)))
    own = [group.name for group in model.cache_groups()]
    assert all(torch.equal(plain[name].nan_to_num(), watched[name].nan_to_num()) for name in own)


def test_the_tap_is_the_live_prefix_of_its_block(model, tapped):
    """What the layer after it adds to, or snapshots; blocks begin at layers 0 and 2."""
    seen = {}
    model(pass_over([(TOKENS, 0, TABLE, 0)], new_cache(tapped)), lambda layer, prefix: seen.setdefault(layer, prefix))
    assert list(seen) == [0, 1, 2, 3]
    given = {}
    for index, layer in enumerate(model.model.layers):
        hook = layer.register_forward_pre_hook(lambda _, args, index=index: given.update({index: args[1]}))
        model(pass_over([(TOKENS, 0, TABLE, 0)], new_cache(tapped)))
        hook.remove()
    assert all(torch.equal(seen[layer], given[layer + 1]) for layer in range(3))


def test_a_draft_does_not_depend_on_the_sequences_beside_it(tapped, draft):
    cache = new_cache(tapped)
    tapped(pass_over([(TOKENS, 0, TABLE, 0), (TOKENS[::-1][:6], 0, OTHER, 1)], cache))
    together = drafts_after(draft, cache, [84, 7], [13, 6], [TABLE, OTHER])
    for index, (anchor, count, table) in enumerate([(84, 13, TABLE), (7, 6, OTHER)]):
        alone = drafts_after(draft, cache, [anchor], [count], [table])
        assert torch.equal(alone.token_ids[0], together.token_ids[index])
        assert torch.allclose(alone.base_KNV[:, 0], together.base_KNV[:, index], rtol=1e-5, atol=1e-6)


def test_poison_outside_a_sequences_rows_reaches_nothing(tapped, draft):
    """Blocks of others, and what lies behind the block, hold NaN or large numbers."""
    found = []
    for fill in (torch.nan, 1e30):
        cache = new_cache(tapped, fill)
        tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
        found.append(drafts_after(draft, cache, [84], [13], [TABLE]))
    assert torch.equal(found[0].base_KNV, found[1].base_KNV)
    assert found[0].base_KNV.isfinite().all()


def test_rows_of_earlier_blocks_are_overwritten_before_they_are_read(tapped, draft):
    """Two caches in which another block was drafted and rejected give the same drafts to the bit."""
    found = []
    for first in (None, 11, 150):
        cache = new_cache(tapped)
        tapped(pass_over([(TOKENS[:9], 0, TABLE, 0)], cache))
        if first is not None:
            drafts_after(draft, cache, [first], [9], [TABLE])
        tapped(pass_over([(TOKENS[9:], 9, TABLE, 0)], cache))
        found.append(drafts_after(draft, cache, [84], [13], [TABLE]).base_KNV)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_only_a_block_that_is_not_causal_sees_its_later_rows(tapped, draft):
    cache = new_cache(tapped)
    tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
    anchor, counts, table = torch.tensor([84]), torch.tensor([13]), torch.tensor([TABLE])
    blocks = draft.blocks(anchor, counts, table, cache, num_drafts=NUM_DRAFTS)
    token_ids = blocks.token_ids.clone()
    token_ids[-1] = 3
    first = draft(blocks)[0], draft(replace(blocks, token_ids=token_ids))[0]
    assert torch.equal(*first) == draft.config.is_causal


def test_every_context_row_is_seen(tapped, draft):
    cache = new_cache(tapped)
    tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
    expected = drafts_after(draft, cache, [84], [13], [TABLE]).base_KNV
    for position in range(13):
        rows = cache[DRAFT_GROUP][:, TABLE[position // BLOCK_SIZE], position % BLOCK_SIZE]
        before = rows.clone()
        rows += 1
        assert not torch.equal(drafts_after(draft, cache, [84], [13], [TABLE]).base_KNV, expected)
        rows.copy_(before)


def test_fewer_drafts_are_the_first_ones(tapped, draft):
    cache = new_cache(tapped)
    tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
    anchor = torch.tensor([84])
    blocks = draft.blocks(anchor, torch.tensor([13]), torch.tensor([TABLE]), cache, num_drafts=NUM_DRAFTS)
    hidden = draft(blocks)
    whole, few = (draft.draft(hidden, anchor, count) for count in (NUM_DRAFTS, 2))
    assert torch.equal(whole.token_ids[:, :2], few.token_ids)


def test_each_choice_sets_the_bias_of_the_next(tapped, draft):
    cache = new_cache(tapped)
    tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
    anchor = torch.tensor([84])
    hidden = draft(draft.blocks(anchor, torch.tensor([13]), torch.tensor([TABLE]), cache, num_drafts=NUM_DRAFTS))
    forced, seen = [7, 150, 0, 42, 9], []

    def choose(index, logits_NV):
        seen.append(logits_NV[0])
        return torch.tensor([forced[index]])

    drafts = draft.draft(hidden, anchor, NUM_DRAFTS, choose)
    assert drafts.token_ids[0].tolist() == forced
    w1, w2 = draft.markov_head.markov_w1.weight.double(), draft.markov_head.markov_w2.weight.double()
    for index, previous in enumerate([84, *forced[:-1]]):
        expected = drafts.base_KNV[index, 0].double() + w2 @ w1[previous]
        assert torch.allclose(seen[index].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_does_not_draft_from_its_anchor_starts_a_row_later(model, tmp_path):
    """The same weights: the drafts are those that the later rows would have yielded."""
    values = gqa_values(**TARGET)
    write_draft(tmp_path, values)
    found = {}
    for samples in (True, False):
        config = replace(load_draft_config(tmp_path), samples_from_anchor=samples)
        state = load_draft_state(tmp_path, config)
        draft = build_draft(config, state, model.model.embed_tokens, model.lm_head, torch.float32)
        tapped = TappedModel(model, draft)
        cache = new_cache(tapped)
        tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
        anchor = torch.tensor([84])
        hidden = draft(draft.blocks(anchor, torch.tensor([13]), torch.tensor([TABLE]), cache))
        found[samples] = draft.draft(hidden, anchor, config.num_trained_drafts).base_KNV
    assert found[False].shape[0] == found[True].shape[0] - 1
    assert torch.allclose(found[True][1:], found[False], rtol=1e-5, atol=1e-6)


def test_logits_that_are_not_finite_index_no_table(tapped, draft):
    anchor = torch.tensor([84])
    with pytest.raises(IndexError):
        draft.draft(torch.full((NUM_DRAFTS, 32), torch.nan), anchor, NUM_DRAFTS)


def test_a_missing_parameter_is_named(directory, model, draft):
    config = load_draft_config(directory)
    state = load_draft_state(directory, config)
    del state["layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        build_draft(config, state, model.model.embed_tokens, model.lm_head, torch.float32)


def test_bfloat16_drafts_stay_near(directory, model, tapped, draft):
    config = load_draft_config(directory)
    embed, head = model.model.embed_tokens, model.lm_head
    narrow = build_draft(config, load_draft_state(directory, config), embed, head, torch.bfloat16)
    taps = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    wide, rounded = draft.context(taps), narrow.context(taps.bfloat16()).float()
    assert 0 < float((wide - rounded).norm() / wide.norm()) < 2e-2


@pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
def test_passes_of_few_tokens_are_recorded_and_replayed_with_their_context_rows(model, tapped, draft):
    """Plain decoding and verifying; the second recording succeeds, for the first one keeps what later ones find."""
    records = CacheStorage(model.record_groups(), num_blocks=0, block_size=1, num_slots=8, dtype="float32").views
    for token_ids, num_verifies in ([[31], 0], [[31, 7, 150], 1]):
        cache, arena = new_cache(tapped), Arena()
        tapped(pass_over([(TOKENS, 0, TABLE, 0)], cache))
        batch = pass_over([(token_ids, len(TOKENS), TABLE, 0)], cache)
        batch = replace(batch, num_verifies=num_verifies, num_decodes=1 - num_verifies, records=records)
        batch.prepare()
        with torch.inference_mode():
            record(lambda batch=batch: tapped(batch), arena)
            recording = record(lambda batch=batch: tapped(batch), arena)
        assert recording.refusal is None
        # a longer pass between needs more than was there when the recording was made
        with torch.inference_mode():
            tapped(pass_over([((TOKENS * 2)[: 4 * BLOCK_SIZE + 3], 0, OTHER, 1)], new_cache(tapped)))
            gc.collect()
            torch.randint(0, 9, (4096,))
        expected = new_cache(tapped)
        tapped(pass_over([(TOKENS, 0, TABLE, 0)], expected))
        for name in cache:
            cache[name].copy_(expected[name])
        batch.token_ids.copy_(torch.tensor([88, 9, 3][: len(token_ids)]))
        replay(recording.program)
        own = replace(batch, cache=expected)
        assert torch.equal(recording.result, tapped(own))
        assert torch.equal(cache[DRAFT_GROUP].nan_to_num(), expected[DRAFT_GROUP].nan_to_num())
