"""Whole answers by drafting, verifying and committing, against decoding one token at a time: the same tokens.

The loop is what an engine does per step, for several requests at once whose drafts fare differently.
"""

from dataclasses import replace

import pytest
import torch

from perilune import ops
from perilune.cache.storage import CacheStorage
from perilune.checkpoint.draft import load_draft_state
from perilune.config.draft import load_draft_config
from perilune.models.draft.model import build_draft
from perilune.models.draft.tapped import TappedModel
from perilune.ops import _native
from perilune.sampling.sampler import uniform
from perilune.speculative.ngram import SuffixProposer
from perilune.speculative.verify import accept_matching
from tests.drafts import gqa_values, mla_values, write_draft
from tests.models.passes import BLOCK_SIZE, pass_over

TARGET = {"hidden": 32, "vocab": 160, "layers": 4, "taps": (0, 2)}
SHAPES = {"mla": mla_values, "gqa": gqa_values}
PROMPTS = [[3, 141, 59, 26, 53, 58, 97], [5, 6, 7, 5, 6, 7, 5, 6], [150]]
NUM_TOKENS, NUM_DRAFTS, BLOCKS_EACH = 16, 5, 9

pytestmark = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))


class Request:
    """What one request knows: its tokens, how many of them the target has processed, and where its rows lie."""

    def __init__(self, index, temperature):
        self.prompt, self.output, self.num_computed = PROMPTS[index], [], 0
        self.table = list(range(index, 3 * BLOCKS_EACH, 3))
        self.slot, self.seed, self.temperature = 2 - index, 100 + index, temperature
        self.accepted = []

    @property
    def tokens(self):
        return [*self.prompt, *self.output]

    def settings(self, ahead):
        """Of the token `ahead` places after the next one."""
        return (self.temperature, 0.0, 0.95, 0.0, uniform(self.seed, len(self.output) + ahead))


def choose(logits, settings):
    return ops.sample_tokens(logits, torch.tensor(settings, dtype=torch.float64), None)[0].tolist()


def plain(model, cache, requests):
    """Everything one token at a time, prompts as a whole."""
    for request in requests:
        while len(request.output) < NUM_TOKENS:
            new = request.tokens[request.num_computed :]
            logits = model(pass_over([(new, request.num_computed, request.table, request.slot)], cache))
            request.num_computed += len(new)
            request.output += choose(logits[-1:], [request.settings(0)])


def speculative(model, cache, requests, propose):
    """Prompts as a whole, then rounds in which all requests verify their drafts in one pass."""
    groups = model.target.record_groups()
    records = CacheStorage(groups, num_blocks=0, block_size=1, num_slots=32, dtype="float32").views
    for request in requests:
        logits = model(pass_over([(request.prompt, 0, request.table, request.slot)], cache))
        request.num_computed = len(request.prompt)
        request.output += choose(logits[-1:], [request.settings(0)])
    while any(len(request.output) < NUM_TOKENS for request in requests):
        drafts = propose(requests)
        rows = [[request.output[-1], *own] for request, own in zip(requests, drafts, strict=True)]
        work = [(own, r.num_computed, r.table, r.slot) for own, r in zip(rows, requests, strict=True)]
        batch = replace(pass_over(work, cache), num_decodes=0, num_verifies=len(requests), records=records)
        settings = [r.settings(i) for own, r in zip(rows, requests, strict=True) for i in range(len(own))]
        chosen, counts, first = choose(model(batch), settings), [], 0
        for request, own in zip(requests, rows, strict=True):
            verdict = accept_matching(chosen[first : first + len(own)], own[1:])
            first += len(own)
            counts.append(verdict.num_accepted + 1)
            request.num_computed += counts[-1]
            request.output += [*own[1 : counts[-1]], verdict.token_id]
            request.accepted.append(verdict.num_accepted)
        model.target.commit(cache, records, batch.state_slots, batch.cu_seqlens, torch.tensor(counts))


def by_draft(draft, cache):
    def propose(requests):
        anchors, counts = (
            torch.tensor(x) for x in zip(*[(r.output[-1], r.num_computed) for r in requests], strict=True)
        )
        blocks = draft.blocks(anchors, counts, torch.tensor([r.table for r in requests]), cache, num_drafts=NUM_DRAFTS)
        return draft.draft(draft(blocks), anchors, NUM_DRAFTS).token_ids.tolist()

    return propose


def by_copying(requests):
    return [SuffixProposer(request.tokens, min_match=1).propose(NUM_DRAFTS) for request in requests]


@pytest.fixture(params=sorted(SHAPES))
def tapped(request, model, tmp_path):
    write_draft(tmp_path, SHAPES[request.param](**TARGET))
    config = load_draft_config(tmp_path)
    state = load_draft_state(tmp_path, config)
    draft = build_draft(config, state, model.model.embed_tokens, model.lm_head, torch.float32)
    return TappedModel(model, draft)


def new_cache(model):
    groups = model.cache_groups()
    storage = CacheStorage(groups, num_blocks=3 * BLOCKS_EACH, block_size=BLOCK_SIZE, num_slots=3, dtype="float32")
    for view in storage.views.values():
        view.fill_(torch.nan)
    storage.zero_slots([0, 1, 2])
    return storage.views


@pytest.fixture(scope="module", params=[0.0, 1.0])
def expected(request, model):
    requests = [Request(index, request.param) for index in range(3)]
    plain(model, new_cache(model), requests)
    return requests


@pytest.mark.parametrize("proposer", ["draft", "copies", "oracle", "none"])
def test_the_tokens_are_those_of_plain_decoding_with_the_same_seed(tapped, expected, proposer):
    temperature = expected[0].temperature

    def by_oracle(requests):
        """Right for a while, each time by another number of tokens, and wrong from there on."""
        found = []
        for request in requests:
            known = expected[PROMPTS.index(request.prompt)].output[len(request.output) :]
            right = (len(request.output) * 7 + request.slot) % (NUM_DRAFTS + 1)
            found.append([*known[:right], *[(token + 1) % 160 for token in known[right:]]][:NUM_DRAFTS])
        return found

    cache, requests = new_cache(tapped), [Request(index, temperature) for index in range(3)]
    proposers = {"draft": by_draft(tapped.draft, cache), "copies": by_copying, "oracle": by_oracle}
    speculative(tapped, cache, requests, proposers.get(proposer, lambda requests: [[] for _ in requests]))
    for right, found in zip(expected, requests, strict=True):
        assert found.output[:NUM_TOKENS] == right.output
    accepted = [count for request in requests for count in request.accepted]
    if proposer == "oracle":
        assert len(set(accepted)) >= 4
    if proposer == "none":
        assert not any(accepted)
