"""Passes that verify tokens which may be taken back, against decoding them one at a time."""

from dataclasses import replace

import pytest
import torch

from perilune.cache.spec import bytes_per_slot
from perilune.cache.storage import CacheStorage
from perilune.ops import _native
from tests.models.passes import filled_cache, pass_over

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62]
ROWS = [64, 33, 83, 27, 95, 2, 88, 17]
TABLE, OTHER, THIRD = [5, 1, 8, 3, 10], [2, 9, 4, 7, 0], [6, 11, 12]
SLOT, OTHER_SLOT, THIRD_SLOT = 2, 4, 1
IS_EXACT = _native.absence() is None


def same(expected, found):
    if IS_EXACT:
        return torch.equal(expected, found)
    return torch.allclose(expected, found, rtol=1e-4, atol=1e-5)


def new_records(model, num_rows=12):
    storage = CacheStorage(model.record_groups(), num_blocks=0, block_size=1, num_slots=num_rows, dtype="float32")
    for view in storage.views.values():
        view.fill_(torch.nan)
    return storage.views


def prefilled(model):
    """A cache in which three sequences have their prompts."""
    storage = filled_cache(model, torch.nan)
    storage.zero_slots([SLOT, OTHER_SLOT, THIRD_SLOT])
    model(pass_over([(PROMPT, 0, TABLE, SLOT)], storage.views))
    model(pass_over([(PROMPT[::-1], 0, OTHER, OTHER_SLOT)], storage.views))
    model(pass_over([(PROMPT[:5], 0, THIRD, THIRD_SLOT)], storage.views))
    return storage.views


def states(model, cache, slot):
    return [cache[group.name][:, slot].clone() for group in model.cache_groups() if group.kind == "state"]


def decoded(model, cache, token_ids):
    """Logits of each token of the first sequence decoded alone, and the states after each."""
    logits, after = [], []
    for index, token_id in enumerate(token_ids):
        logits.append(model(pass_over([([token_id], len(PROMPT) + index, TABLE, SLOT)], cache))[0])
        after.append(states(model, cache, SLOT))
    return torch.stack(logits), after


def verify(model, cache, records, work, num_verifies):
    batch = replace(pass_over(work, cache), num_verifies=num_verifies, records=records)
    plain = len(work) - num_verifies
    return model(replace(batch, num_decodes=sum(len(ids) == 1 for ids, *_ in work[:plain])))


def commit(model, cache, records, slots, lengths, counts):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    model.commit(cache, records, torch.tensor(slots), bounds, torch.tensor(counts))


def test_verified_logits_are_those_of_decoding_one_at_a_time(model):
    expected, _ = decoded(model, prefilled(model), ROWS)
    cache = prefilled(model)
    before = states(model, cache, SLOT)
    logits = verify(model, cache, new_records(model), [(ROWS, len(PROMPT), TABLE, SLOT)], 1)
    assert same(expected, logits)
    assert all(torch.equal(a, b) for a, b in zip(before, states(model, cache, SLOT), strict=True))


@pytest.mark.parametrize("count", range(1, len(ROWS) + 1))
def test_committed_states_are_those_of_decoding_one_at_a_time(model, count):
    _, after = decoded(model, prefilled(model), ROWS[:count])
    cache, records = prefilled(model), new_records(model)
    verify(model, cache, records, [(ROWS, len(PROMPT), TABLE, SLOT)], 1)
    commit(model, cache, records, [SLOT], [len(ROWS)], [count])
    assert all(same(a, b) for a, b in zip(after[-1], states(model, cache, SLOT), strict=True))


def test_rounds_of_verifying_and_taking_back_go_on_as_if_only_the_kept_tokens_had_been(model):
    kept = ROWS[:3] + ROWS[4:6] + ROWS[6:]
    expected, _ = decoded(model, prefilled(model), kept)
    cache, records, position, found = prefilled(model), new_records(model), len(PROMPT), []
    for tokens, count in (([*ROWS[:3], 150, 7, 9], 3), ([*ROWS[4:6], 0, 0], 2), (ROWS[6:], 2)):
        logits = verify(model, cache, records, [(tokens, position, TABLE, SLOT)], 1)
        commit(model, cache, records, [SLOT], [len(tokens)], [count])
        found.append(logits[:count])
        position += count
    assert same(expected, torch.cat(found))


def test_rejected_tokens_cannot_leak(model):
    found = []
    for rejected in ([1, 2, 4], [150, 151, 152]):
        cache, records = prefilled(model), new_records(model)
        verify(model, cache, records, [(ROWS[:2] + rejected, len(PROMPT), TABLE, SLOT)], 1)
        commit(model, cache, records, [SLOT], [5], [2])
        logits = model(pass_over([(ROWS[2:3], len(PROMPT) + 2, TABLE, SLOT)], cache))
        found.append((logits, *states(model, cache, SLOT)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_decodes_prompts_and_verified_sequences_share_a_pass(model):
    """Each is as it would be alone, and so are the states that it leaves."""
    alone = prefilled(model)
    one = model(pass_over([([40], len(PROMPT), OTHER, OTHER_SLOT)], alone))
    prompt = model(pass_over([(ROWS[:6], 5, THIRD, THIRD_SLOT)], alone))
    records = new_records(model)
    drafted = verify(model, alone, records, [(ROWS, len(PROMPT), TABLE, SLOT)], 1)
    commit(model, alone, records, [SLOT], [len(ROWS)], [4])

    cache, records = prefilled(model), new_records(model)
    work = [
        ([40], len(PROMPT), OTHER, OTHER_SLOT),
        (ROWS[:6], 5, THIRD, THIRD_SLOT),
        (ROWS, len(PROMPT), TABLE, SLOT),
    ]
    logits = verify(model, cache, records, work, 1)
    commit(model, cache, records, [SLOT], [len(ROWS)], [4])
    assert same(torch.cat((one, prompt, drafted)), logits)
    for slot in (SLOT, OTHER_SLOT, THIRD_SLOT):
        assert all(same(a, b) for a, b in zip(states(model, alone, slot), states(model, cache, slot), strict=True))


def test_several_sequences_are_verified_at_once_to_different_lengths(model):
    cache, records = prefilled(model), new_records(model)
    work = [(ROWS[:4], len(PROMPT), TABLE, SLOT), (ROWS[4:], len(PROMPT), OTHER, OTHER_SLOT)]
    logits = verify(model, cache, records, work, 2)
    commit(model, cache, records, [SLOT, OTHER_SLOT], [4, 4], [1, 4])
    expected, after = decoded(model, prefilled(model), ROWS[:4])
    assert same(expected, logits[:4])
    assert all(same(a, b) for a, b in zip(after[0], states(model, cache, SLOT), strict=True))
    single = prefilled(model)
    for index, token_id in enumerate(ROWS[4:]):
        model(pass_over([([token_id], len(PROMPT) + index, OTHER, OTHER_SLOT)], single))
    both = zip(states(model, single, OTHER_SLOT), states(model, cache, OTHER_SLOT), strict=True)
    assert all(same(a, b) for a, b in both)


def test_records_take_the_bytes_that_their_groups_say(model, config):
    views = new_records(model, num_rows=1)
    kda, layers = config.kda, len(config.kda_layers)
    expected = layers * kda.projection_size * 4 * (3 + 1 + 1 + 1)
    assert bytes_per_slot(model.record_groups(), "float32") == expected == sum(view.nbytes for view in views.values())
