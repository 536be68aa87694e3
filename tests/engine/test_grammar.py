"""Grammars inside the engine: any sampling, any batch, preemption, and failures that stay with their request."""

import json

import pytest
from jsonschema import Draft202012Validator

from perilune.config.engine import EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.errors import RequestError
from perilune.grammar.answer import json_body, lark_body, regex_body, text_grammar
from perilune.sampling.params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["new moon", "full moon"]},
        "day": {"type": "integer", "minimum": 1, "maximum": 29},
    },
    "required": ["kind", "day"],
    "additionalProperties": False,
}
JSON = text_grammar(json_body(SCHEMA, "structured_outputs.json"))
LETTERS = text_grammar(regex_body("[a-f]{30}", "structured_outputs.regex"))
PROMPT = (72, 101, 108, 108, 111)


@pytest.fixture(scope="module")
def core(random_checkpoint):
    return build_engine(random_checkpoint, EngineConfig(max_num_seqs=8, num_blocks=200, dtype="float32"))


def request(name, grammar, **params):
    return GenerateRequest(name, PROMPT, SamplingParams(**{"max_tokens": 80, **params}), grammar=grammar)


def run(core, *requests):
    """The last output and the text of each request, run as one batch."""
    ids = {item.request_id: [] for item in requests}
    last = {}
    for item in requests:
        core.add(item)
    while core.has_work:
        for output in core.step():
            ids[output.request_id] += output.token_ids
            last[output.request_id] = output
    core.check_integrity()
    return {name: (last[name], core.tokenizer.decode(ids[name], skip_special=True)) for name in ids}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 3},
        {"temperature": 5, "top_k": 3, "seed": 4},
        {"temperature": 1, "top_p": 0.1, "min_p": 0.5, "seed": 5},
        {"temperature": 0, "repetition_penalty": 2, "presence_penalty": 2, "frequency_penalty": 2},
        {"temperature": 1, "logprobs": 5, "seed": 6},
        {"temperature": 1, "logit_bias": {ord("{"): -100.0, ord('"'): -100.0}, "seed": 7},
    ],
)
def test_answers_obey_their_schema_under_every_kind_of_sampling(core, params):
    output, text = run(core, request("a", JSON, **params))["a"]
    assert output.finish_reason is FinishReason.STOP, text
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_log_probabilities_are_the_models_own_and_not_those_of_the_mask(core):
    plain = run(core, request("a", None, temperature=0, logprobs=3, max_tokens=1))["a"][0]
    bound = run(core, request("b", JSON, temperature=0, logprobs=3, max_tokens=1))["b"][0]
    assert bound.logprobs[0].top == plain.logprobs[0].top
    assert core.tokenizer.token_bytes(bound.token_ids[0]) == b"{"
    assert bound.logprobs[0].rank > 1


def test_a_grammar_changes_no_other_request_of_its_batch(core):
    free = [request(f"free{index}", None, seed=index, max_tokens=20) for index in range(3)]
    alone = {item.request_id: run(core, item)[item.request_id][1] for item in free}
    bound = [request(f"bound{index}", JSON, seed=index) for index in range(3)]
    bound_alone = {item.request_id: run(core, item)[item.request_id][1] for item in bound}
    mixed = {name: text for name, (_, text) in run(core, *free, *bound).items()}
    assert mixed == {**alone, **bound_alone}


def test_a_preempted_answer_goes_on_where_its_grammar_was(random_checkpoint):
    small = build_engine(random_checkpoint, EngineConfig(max_num_seqs=4, num_blocks=8, block_size=8, max_model_len=64))
    requests = [request(f"r{index}", LETTERS, seed=index, max_tokens=40) for index in range(4)]
    alone = {item.request_id: run(small, item)[item.request_id][1] for item in requests}
    assert small.stats().num_preemptions_total == 0
    together = {name: text for name, (_, text) in run(small, *requests).items()}
    assert small.stats().num_preemptions_total > 0
    assert together == alone
    assert all(len(text) == 30 for text in together.values())


def test_an_answer_whose_grammar_leads_nowhere_fails_alone(core):
    # after "a" it wants what no text can be: a character that is both x and y
    dead = text_grammar(lark_body('start: "a" NEVER\nNEVER: /x/ & /y/', "structured_outputs.grammar"))
    good = request("good", JSON, seed=1)
    results = run(core, request("dead", dead), good)
    assert results["dead"][0].finish_reason is FinishReason.ERROR
    assert "grammar" in results["dead"][0].error
    assert results["good"][0].finish_reason is FinishReason.STOP


def test_a_grammar_that_fails_in_mid_answer_ends_its_request_with_the_reason(core):
    bad, good = request("bad", LETTERS, seed=1), request("good", JSON, seed=1)
    state = core.compile(bad)
    core.add(bad, state)
    core.add(good)
    last = {}
    while core.has_work:
        for output in core.step():
            last[output.request_id] = output
        state.advance(core.tokenizer.end_of_msg_id)  # what no model could have chosen
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert last["bad"].error.startswith("the grammar failed: ")
    assert last["good"].finish_reason is FinishReason.STOP


def test_compiled_grammars_are_kept_and_their_states_are_apart(core):
    first, second = core.compile(request("a", LETTERS)), core.compile(request("b", LETTERS))
    first.advance(ord("a"))
    first.advance(ord("!"))
    assert first.error is not None
    second.advance(ord("a"))
    assert second.error is None


def test_ignore_eos_with_a_grammar_is_refused(core):
    with pytest.raises(RequestError, match="leave it out") as raised:
        core.check(request("a", JSON, ignore_eos=True))
    assert raised.value.param == "ignore_eos"
