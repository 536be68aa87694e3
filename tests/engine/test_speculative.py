"""Guessing tokens changes how many a step yields, and nothing else: no token, no log-probability, no end."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from perilune.cache.moves import CopyState
from perilune.config.engine import EngineConfig
from perilune.engine.batch import StepResult
from perilune.engine.build import assemble_engine, build_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.engine.steps.draft_model import open_draft
from perilune.engine.steps.drafting import Proposal
from perilune.errors import CheckpointError, ConfigError
from perilune.grammar.answer import json_body, regex_body, text_grammar
from perilune.ops import _native
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import run, tokens_of
from tests.engine.guesses import Guesser, always_guess

IS_EXACT = _native.absence() is None
SETTINGS = EngineConfig(dtype="float32", num_blocks=200, block_size=4, max_model_len=160, max_num_seqs=8)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "biased": {"temperature": 0.0, "logit_bias": {7: 9.0, 11: -50.0}},
}


@pytest.fixture(scope="module", params=["k3-tiny", "k31-tiny"])
def model(request, goldens_dir):
    return load_model(goldens_dir / request.param, SETTINGS)


def requests(vocab_size, **params):
    source = random.Random(3)
    values = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3, "seed": 11, **params}
    return [
        GenerateRequest(
            f"r{index}", tuple(source.randrange(5, vocab_size) for _ in range(length)), SamplingParams(**values)
        )
        for index, length in enumerate((1, 5, 17, 40, 64))
    ]


def answers(core, messages):
    """Of each request its tokens, log-probabilities and end."""
    return {
        name: (
            tokens_of(outputs),
            [entry for output in outputs for entry in output.logprobs or ()],
            (outputs[-1].finish_reason, outputs[-1].stop_reason, outputs[-1].num_output_tokens),
        )
        for name, outputs in run(core, messages).items()
    }


def plain(model, messages, **changed):
    return answers(assemble_engine(model, None, replace(SETTINGS, **changed)), messages)


def guessing_core(model, expected, *, lies=0.3, seed=0, **changed):
    core = assemble_engine(model, None, replace(SETTINGS, speculative="ngram", num_drafts=5, **changed))
    tokens = {name: list(found[0]) for name, found in expected.items()}
    return always_guess(core, Guesser(tokens, share_of_lies=lies, vocab_size=model.config.vocab_size, seed=seed))


def assert_same(expected, found, *, is_exact=IS_EXACT):
    assert found.keys() == expected.keys()
    for name, (tokens, logprobs, end) in expected.items():
        assert found[name][0] == tokens, name
        assert found[name][2] == end, name
        if is_exact:
            assert found[name][1] == logprobs, name
        else:
            values = zip(logprobs, found[name][1], strict=True)
            assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in values), name


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("lies", [0.0, 0.3, 1.0])
def test_answers_are_those_without_guesses(model, params, lies):
    messages = requests(model.config.vocab_size, **params)
    expected = plain(model, messages)
    core = guessing_core(model, expected, lies=lies)
    assert_same(expected, answers(core, messages))
    assert core.stats().num_steps_total < 24 or lies == 1.0
    assert core.stats().drafts.num_drafted > core.stats().drafts.num_accepted * (lies > 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_blocks": 41, "max_num_seqs": 8},  # preemption
        {"max_num_batched_tokens": 40},  # prompts in pieces, which leave few tokens for guesses
        {"max_num_seqs": 2},
        {"prefix_cache": False},
    ],
    ids=["preempted", "chunked", "queued", "uncached"],
)
def test_answers_are_those_without_guesses_under_every_schedule(model, changed):
    messages = requests(model.config.vocab_size, temperature=0.9)
    expected = plain(model, messages)
    core = guessing_core(model, expected, **changed)
    # what was preempted computes its answer again as a prompt, which rounds otherwise
    assert_same(expected, answers(core, messages), is_exact=IS_EXACT and "num_blocks" not in changed)
    if "num_blocks" in changed:
        assert core.stats().num_preemptions_total > 0


def test_what_an_answer_with_guesses_leaves_is_taken_up_by_the_next_turn(model):
    """Rows and state behind the last token that was taken, also where it ended among guesses that were right."""
    messages = requests(model.config.vocab_size)
    first = plain(model, messages)
    core = guessing_core(model, first)
    answers(core, messages)
    turns = [
        replace(x, request_id=f"{x.request_id}+", prompt_token_ids=(*x.prompt_token_ids, *first[x.request_id][0], 9, 8))
        for x in messages
    ]
    expected = plain(model, turns)
    core._drafting._proposer._answers |= {name: list(found[0]) for name, found in expected.items()}
    outputs = run(core, turns)
    assert {name: tokens_of(found) for name, found in outputs.items()} == {n: x[0] for n, x in expected.items()}
    for turn in turns:
        # all but the last token of the answer, which was sampled and never computed
        assert outputs[turn.request_id][-1].num_cached_tokens == len(turn.prompt_token_ids) - 3


def test_rejected_guesses_cannot_leak(model):
    messages = requests(model.config.vocab_size)
    expected = plain(model, messages)
    found = [answers(guessing_core(model, expected, lies=0.6, seed=seed), messages) for seed in (1, 2)]
    assert found[0] == found[1]
    assert_same(expected, found[0])


@pytest.mark.parametrize("place", range(1, 12))
def test_an_answer_ends_where_it_must_also_among_right_guesses(model, place):
    messages = requests(model.config.vocab_size, max_tokens=24)
    expected = plain(model, messages)
    stop = expected["r2"][0][place]
    for params in ({"stop_token_ids": (stop,)}, {"max_tokens": place}):
        ending = requests(model.config.vocab_size, **params)
        want = plain(model, ending)
        core = guessing_core(model, expected, lies=0.0)
        assert_same(want, answers(core, ending))
        assert core.stats().blocks_used == core.stats().slots_used == 0


def test_the_states_of_guesses_take_what_is_accounted_for(model):
    core = guessing_core(model, {})
    groups, rows = model.record_groups(), SETTINGS.max_num_seqs * 6
    measured = sum(view.nbytes for view in core._drafting.records.values())
    assert measured == rows * sum(group.row_bytes("float32") for group in groups)
    # one state for each request, whatever is verified
    plain_core = assemble_engine(model, None, SETTINGS)
    assert core.stats().slots_total == plain_core.stats().slots_total


@pytest.mark.parametrize("kind", ["mla", "mla_causal", "gqa"])
def test_a_draft_model_changes_no_answer(goldens_dir, kind):
    directory = goldens_dir / "k31-tiny"
    model = load_model(directory, SETTINGS)
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / kind))
    draft = open_draft(directory, settings, model.config)
    messages = requests(model.config.vocab_size)
    expected = plain(model, messages)
    core = always_guess(assemble_engine(model, None, settings, draft=draft.build(model)))
    assert_same(expected, answers(core, messages))


def test_a_draft_sees_the_rows_of_a_prefix_that_was_taken_up(goldens_dir):
    """Its guesses are those that it makes where the whole prompt was computed."""
    directory = goldens_dir / "k31-tiny"
    model = load_model(directory, SETTINGS)
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / "mla"), num_drafts=7)
    draft = open_draft(directory, settings, model.config).build(model)
    (message,) = requests(model.config.vocab_size, max_tokens=8)[3:4]

    def guesses(core):
        found, propose = [], core._drafting._proposer.propose

        def note(sequences):
            proposals = propose(sequences)
            found.extend(
                (item.seq_len, *proposal.token_ids) for item, proposal in zip(sequences, proposals, strict=True)
            )
            return proposals

        core._drafting._proposer.propose = note
        (outputs,) = run(always_guess(core), [message]).values()
        return found, outputs[-1].num_cached_tokens

    cold, num_cached = guesses(assemble_engine(model, None, settings, draft=draft))
    assert num_cached == 0
    warm = assemble_engine(model, None, settings, draft=draft)
    run(always_guess(warm), [replace(message, request_id="before")])
    found, num_cached = guesses(warm)
    assert num_cached > 0
    assert found == cold
    assert len(cold) > 1


def test_a_draft_for_another_target_is_refused_naming_both(goldens_dir, random_checkpoint):
    draft = str(goldens_dir / "dspark-tiny" / "mla")
    with pytest.raises(ConfigError, match=r"vocab_size|hidden_size|layers"):
        build_engine(random_checkpoint, EngineConfig(speculative=draft))
    with pytest.raises(ConfigError, match="is no directory"):
        build_engine(random_checkpoint, EngineConfig(speculative="dspark"))
    with pytest.raises((ConfigError, CheckpointError)):
        build_engine(random_checkpoint, EngineConfig(speculative=str(random_checkpoint)))


# --- with text


@pytest.fixture(scope="module")
def text_cores(random_checkpoint):
    settings = EngineConfig(max_num_seqs=8, num_blocks=200, dtype="float32")
    speculative = build_engine(random_checkpoint, replace(settings, speculative="ngram"))
    return build_engine(random_checkpoint, settings), speculative


SCHEMA = {"type": "object", "properties": {"day": {"type": "integer"}, "kind": {"enum": ["new moon", "full moon"]}}}
SCHEMA |= {"required": ["day", "kind"], "additionalProperties": False}


@pytest.mark.parametrize("lies", [0.0, 0.4])
def test_grammars_and_stop_strings_hold_as_without_guesses(text_cores, lies):
    core, speculative = text_cores
    schema = text_grammar(json_body(SCHEMA, "structured_outputs.json"))
    letters = text_grammar(regex_body("[a-f]{30}", "structured_outputs.regex"))
    prompt = (72, 101, 108, 108, 111)

    def messages():
        values = {"temperature": 1.0, "max_tokens": 60}
        for index in range(3):
            params = SamplingParams(seed=index, **values)
            yield GenerateRequest(f"schema{index}", prompt, params, grammar=schema)
            yield GenerateRequest(f"letters{index}", prompt, params, grammar=letters)
            yield GenerateRequest(f"stop{index}", prompt, SamplingParams(seed=index, stop=("a", "e", "Z"), **values))

    expected = answers(core, list(messages()))
    tokens = {name: list(found[0]) for name, found in expected.items()}
    vocab_size = speculative.limits.vocab_size
    always_guess(speculative, Guesser(tokens, share_of_lies=lies, vocab_size=vocab_size))
    assert answers(speculative, list(messages())) == expected
    assert {end[0] for *_, end in expected.values()} >= {FinishReason.STOP}


def test_what_stood_in_the_text_before_is_guessed(random_checkpoint):
    """An answer that a bias makes repeat the prompt takes fewer steps than it has tokens."""
    core = build_engine(random_checkpoint, EngineConfig(num_blocks=200, dtype="float32", speculative="ngram"))
    params = SamplingParams(temperature=0.0, max_tokens=32, logit_bias={20: 100.0}, ignore_eos=True)
    (outputs,) = run(always_guess(core), [GenerateRequest("copy", (20,) * 8, params)]).values()
    assert tokens_of(outputs) == (20,) * 32
    assert [len(output.token_ids) for output in outputs] == [1, 8, 8, 8, 7]


def test_engine_settings_that_make_no_sense_are_refused():
    for options, words in (
        ({"num_drafts": 3}, "speculative is off"),
        ({"speculative": "ngram", "num_drafts": 0}, "at least 1"),
        ({"speculative": "ngram", "draft_rope_theta": 5.0}, "no draft"),
        ({"speculative": ""}, "allowed are"),
        ({"speculative": "dspark", "draft_rope_theta": float("inf")}, "finite"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig(**options)


def test_inference_mode_and_gradients_stay_as_they_were(model):
    core = guessing_core(model, {name: ([1] * 30, [], None) for name in ("r0", "r1", "r2", "r3", "r4")})
    run(core, requests(model.config.vocab_size))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.skipif(not IS_EXACT, reason=str(_native.absence()))
@pytest.mark.parametrize("kind", ["mla", "mla_causal", "gqa"])
def test_replayed_draft_passes_guess_as_the_draft_itself(goldens_dir, kind, monkeypatch):
    directory = goldens_dir / "k31-tiny"
    model = load_model(directory, SETTINGS)
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / kind), num_drafts=7)
    draft = open_draft(directory, settings, model.config).build(model)
    messages = requests(model.config.vocab_size, max_tokens=40)

    def guesses():
        core, found = assemble_engine(model, None, settings, draft=draft), []
        propose = core._drafting._proposer.propose

        def note(sequences):
            found.append(propose(sequences))
            return found[-1]

        core._drafting._proposer.propose = note
        run(always_guess(core), messages)
        return found, len(core._drafting._proposer._replayed._passes)

    replayed, num_passes = guesses()
    monkeypatch.setattr("perilune.engine.steps.draft_replay.TRIALS", 0)
    plain_guesses, none = guesses()
    assert num_passes > 0 == none
    assert replayed == plain_guesses


# So hot that draft and target overlap, with a few tokens that stand out for the target alone.
BIAS = {20: 100.0, 21: 90.0, 22: 80.0, 23: 70.0}
RULED = {
    "drawn": {"temperature": 20.0, "logit_bias": BIAS},
    "filtered": {"temperature": 20.0, "logit_bias": BIAS, "top_p": 0.8, "presence_penalty": 2.0},
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("params", RULED.values(), ids=RULED)
def test_drawn_guesses_keep_the_law_of_the_answers(goldens_dir, rule, params):
    """Tokens over many seeds, with drawn guesses against without: a chi-squared test of two samples."""
    directory = goldens_dir / "k31-tiny"
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / "mla"), max_num_seqs=64, num_blocks=400)
    model = load_model(directory, settings)
    draft = open_draft(directory, settings, model.config).build(model)

    def answers_of(core, first_seed):
        values = {"max_tokens": 4, "ignore_eos": True, **params}
        messages = [
            GenerateRequest(str(seed), (5, 6, 7), SamplingParams(seed=first_seed + seed, **values))
            for seed in range(300)
        ]
        return [tokens_of(outputs) for outputs in run(core, messages).values()]

    plain_tokens = answers_of(assemble_engine(model, None, replace(settings, speculative="off")), 0)
    core = always_guess(assemble_engine(model, None, replace(settings, draft_rule=rule), draft=draft))
    found = answers_of(core, 10_000)
    assert core.stats().drafts.num_accepted > 0
    for place in (1, 2, 3):
        assert two_sample_excess([x[place] for x in plain_tokens], [x[place] for x in found]) < 4, place


def two_sample_excess(first, second):
    """Wilson-Hilferty deviate of the chi-squared statistic of two samples; rare values share a cell."""
    counts = [Counter(first), Counter(second)]
    common = [value for value in counts[0] | counts[1] if counts[0][value] + counts[1][value] >= 20]
    cells = [[count[value] for value in common] for count in counts]
    for cell, sample in zip(cells, (first, second), strict=True):
        cell.append(len(sample) - sum(cell))
    ratio = (len(second) / len(first)) ** 0.5
    pairs = [(a, b) for a, b in zip(*cells, strict=True) if a + b]
    statistic = sum((a * ratio - b / ratio) ** 2 / (a + b) for a, b in pairs)
    freedom = len(pairs) - 1
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def test_the_comparison_of_two_samples_sees_another_law():
    source = random.Random(0)
    same = [[source.choice("aabc") for _ in range(400)] for _ in range(2)]
    other = [source.choice("abbc") for _ in range(400)]
    assert two_sample_excess(*same) < 4 < two_sample_excess(same[0], other)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_greedy_answers_are_the_same_under_every_rule(goldens_dir, rule):
    directory = goldens_dir / "k31-tiny"
    model = load_model(directory, SETTINGS)
    settings = replace(SETTINGS, speculative=str(goldens_dir / "dspark-tiny" / "mla"), draft_rule=rule)
    draft = open_draft(directory, settings, model.config).build(model)
    greedy, drawn = (
        requests(model.config.vocab_size, temperature=0.0),
        requests(model.config.vocab_size, temperature=1.0),
    )
    expected = plain(model, greedy)
    core = always_guess(assemble_engine(model, None, settings, draft=draft))
    found = answers(core, [*greedy, *(replace(item, request_id=f"{item.request_id} drawn") for item in drawn)])
    assert_same(expected, {name: found[name] for name in expected})


@pytest.mark.skipif(not IS_EXACT, reason="without the native core nothing is replayed")
def test_steps_that_decode_and_verify_are_replayed(model):
    messages = requests(model.config.vocab_size, logprobs=None)
    core = guessing_core(model, plain(model, messages), lies=0.0)
    proposer = core._drafting._proposer
    propose = proposer.propose
    # guesses for every other answer, always as many
    proposer.propose = lambda sequences: [
        found if index % 2 else Proposal(found.token_ids[:0]) for index, found in enumerate(propose(sequences))
    ]
    run(core, messages)
    mixed = [key for key in core._runner._replayed._steps if min(key.num_tokens) == 1 < max(key.num_tokens)]
    assert mixed


def test_a_step_that_only_moves_what_is_cached_knows_nothing_of_guesses_before_it(model):
    messages = requests(model.config.vocab_size)[2:3]
    core = guessing_core(model, plain(model, messages), lies=0.0)
    core.add(messages[0])
    while not core._drafting.has_guesses:
        core.step()
    core.abort(messages[0].request_id)
    move = CopyState(0, 1)
    core._scheduler._moves.append(move)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core._runner, "execute", lambda batch: StepResult() if batch.moves == (move,) else None)
        assert core.step() == []
    assert not core._drafting.has_guesses
