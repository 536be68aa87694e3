"""A request's answer does not depend, in a single bit, on what else the engine computes in the same steps."""

import random

import pytest

from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import GenerateRequest
from perilune.ops import _native
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import run

pytestmark = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))

SETTINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights and activations": {"dtype": "bfloat16", "dense_weights": "int8", "activations": "int8"},
}


@pytest.fixture(scope="module", params=["k3-tiny", "k31-tiny"])
def directory(request, goldens_dir):
    return goldens_dir / request.param


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda name: name.replace(" ", "-"))
def settings(request):
    return EngineConfig(
        num_blocks=1200,
        max_model_len=128,
        block_size=4,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        **SETTINGS[request.param],
    )


def answers(model, requests, settings):
    """Tokens, and the log-probabilities of what was chosen and of five alternatives, by request."""
    outputs = run(assemble_engine(model, None, settings), requests)
    return {
        request_id: [(output.token_ids, output.logprobs) for output in own if output.token_ids]
        for request_id, own in outputs.items()
    }


def test_a_request_alone_answers_as_among_63_others_to_the_bit(directory, settings):
    model, chosen = load_model(directory, settings), random.Random(7)

    def request(name, length, max_tokens):
        prompt = tuple(chosen.randrange(5, model.config.vocab_size) for _ in range(length))
        return GenerateRequest(
            name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
        )

    observed = [request("one token", 1, 8), request("short", 19, 8), request("long", 70, 8)]
    others = [request(f"other {i}", chosen.randrange(1, 40), chosen.randrange(1, 12)) for i in range(61)]
    alone = {}
    for own in observed:
        alone |= answers(model, [own], settings)
    together = answers(model, [*others[:30], *observed, *others[30:]], settings)
    assert {own.request_id: together[own.request_id] for own in observed} == alone
