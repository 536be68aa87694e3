"""Laws of the model with its cache: how tokens are divided into passes and batches does not change their logits."""

import dataclasses
import random

import pytest
import torch

from perilune.checkpoint.loader import load_state
from perilune.config.model import NormEps
from perilune.config.parse import load_model_config
from perilune.models.inputs import ForwardBatch
from perilune.models.model import build_model
from perilune.verify.logits import read_golden, replay_logits
from perilune.verify.replay import Replay

# float32 rounds differently when products have other shapes; the tiny models amplify that to about 1e-5
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["k31-micro", "k3-tiny", "k31-tiny"])
def directory(request):
    if request.param == "k31-micro":
        return request.getfixturevalue("micro_checkpoint")
    return request.getfixturevalue("goldens_dir") / request.param


def load(directory, **changes):
    config = dataclasses.replace(load_model_config(directory), **changes)
    return build_model(config, load_state(directory, config), NormEps(), torch.float32)


@pytest.fixture(scope="module")
def model(directory):
    return load(directory)


@pytest.fixture(scope="module")
def token_ids(directory, model):
    return read_golden(directory / "golden.npz", model.config).token_ids


@pytest.fixture(scope="module")
def whole(model, token_ids):
    return replay_logits(model, token_ids, "whole")


def relative_error(expected, found):
    return float((found - expected).norm() / expected.norm())


def other_prompt(model, seed, length):
    rng = random.Random(seed)
    return [rng.randrange(model.config.vocab_size) for _ in range(length)]


def test_a_pass_without_cache_equals_one_with_it(model, token_ids, whole):
    with torch.inference_mode():
        logits = model(ForwardBatch.whole(torch.tensor([token_ids])))
    assert relative_error(whole, logits) <= TOLERANCE


@pytest.mark.parametrize("size", [3, 33])
def test_chunked_prefill_equals_whole(model, token_ids, whole, size):
    assert relative_error(whole, replay_logits(model, token_ids, f"chunked:{size}")) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 7, 16])
def test_chunked_prefill_then_decode_equals_whole(model, token_ids, whole, size):
    split = len(token_ids) // 2
    replay = Replay(model, num_sequences=1, max_len=len(token_ids))
    pieces = [token_ids[at : min(at + size, split)] for at in range(0, split, size)]
    pieces += [token_ids[at : at + 1] for at in range(split, len(token_ids))]
    logits = torch.cat([replay.step([(0, piece)])[0] for piece in pieces])
    assert relative_error(whole, logits) <= TOLERANCE


def test_batched_with_other_requests_equals_alone(model, token_ids, whole):
    """Prompts of several lengths in random pieces: decoding and prefilling sequences share every pass."""
    rng = random.Random(0)
    prompts = [list(token_ids), *(other_prompt(model, length, length) for length in (5, 23, 40))]
    replay = Replay(model, num_sequences=4, max_len=max(map(len, prompts)), block_size=4)
    logits = [[] for _ in prompts]
    while any(prompts):
        waiting = [number for number, prompt in enumerate(prompts) if prompt]
        work = []
        for number in rng.sample(waiting, rng.randint(1, len(waiting))):
            size = rng.choice([1, 1, 3, 9, 17])
            work.append((number, prompts[number][:size]))
            prompts[number] = prompts[number][size:]
        for (number, _), found in zip(work, replay.step(work), strict=True):
            logits[number].append(found)
    assert relative_error(whole, torch.cat(logits[0])) <= TOLERANCE


def test_batch_composition_does_not_change_greedy_tokens(model, token_ids):
    num_tokens, prompts = 12, [list(token_ids[:20]), list(token_ids[5:14]), other_prompt(model, 7, 31)]

    def generate(chosen):
        replay = Replay(model, num_sequences=len(chosen), max_len=48)
        pending = list(enumerate(chosen))
        outputs = [[] for _ in chosen]
        for _ in range(num_tokens):
            best = [int(logits[-1].argmax()) for logits in replay.step(pending)]
            for output, token_id in zip(outputs, best, strict=True):
                output.append(token_id)
            pending = [(number, [token_id]) for number, token_id in enumerate(best)]
        return outputs

    assert generate(prompts) == [generate([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("directory", ["k31-micro", "k31-tiny"], indirect=True)
def test_selecting_at_least_the_context_means_dense_attention(directory, model, token_ids):
    wide = dataclasses.replace(model.config.indexer, topk=len(token_ids))
    replay = Replay(load(directory, indexer=wide), num_sequences=2, max_len=2 * len(token_ids))
    # a longer neighbour makes the pass select; alone, the short prompt would be told to take every row
    longer = other_prompt(model, 0, 2 * len(token_ids))
    dense = replay_logits(dense_twin(directory, model.config), token_ids, "whole")
    assert relative_error(dense, replay.step([(0, token_ids), (1, longer)])[0]) <= TOLERANCE
    assert relative_error(dense, replay_logits(load(directory, indexer=wide), token_ids, "whole")) <= TOLERANCE


def dense_twin(directory, config):
    """The same weights in a model that has no indexer at all."""
    state = load_state(directory, config)
    dense = dataclasses.replace(config, arch="k3", indexer=None)
    return build_model(dense, state, NormEps(), torch.float32)


@pytest.mark.parametrize("directory", ["k31-micro", "k31-tiny"], indirect=True)
def test_a_narrow_selection_is_not_dense(directory, model, token_ids, whole):
    assert model.config.indexer.topk < len(token_ids)
    dense = replay_logits(dense_twin(directory, model.config), token_ids, "whole")
    assert relative_error(dense, whole) > 0.01
